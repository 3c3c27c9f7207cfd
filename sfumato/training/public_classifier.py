"""The public classifier: a network trained on the labelled public images alone (RPGen stage 1, PrivImage).

Nothing here reads a sensitive image. Later `sfumato.queries.histogram` counts its answers on sensitive images, and
charges for that count alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.data.images import ImageSet
from sfumato.errors import DataError
from sfumato.features.public_network import PublicNetwork, WhitenedCNN, build_network
from sfumato.runtime import compute
from sfumato.runtime.compute import fast_bfloat16
from sfumato.settings.training import Classifier

LABEL_SMOOTHING = 0.1
WEIGHT_DECAY, WHITENED_DECAY = 0.02, 5e-4
WHITENED_BY = 5000  # images whose patches set the first layer
WARM_UP = 0.2  # share of the steps in which the learning rate rises
SHIFT = 8  # an image moves by at most its side / SHIFT
SCORED = 512  # images at a time when it computes the accuracy


def train_public_classifier(
    images: ImageSet, settings: Classifier, seed: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[PublicNetwork, float]:
    """Train on a random part of the public images, and measure the accuracy on the rest, a share `settings.validation`.

    images: public, read batch by batch, so they may be memory-mapped. One-cycle learning rate, smoothed labels, random
    shifts, and mirroring of colour images only (a mirrored letter is another letter). `seed` fixes the split,
    initialisation, order and augmentation; the global generator stays as it was.
    progress: called with (steps done, steps).
    Returns the network after its last step, in eval mode, and its accuracy on the validation part, in [0, 1].
    Raises DataError where the set is too small to split.
    """
    order = np.random.default_rng(seed)
    chosen = order.permutation(len(images))
    held = max(1, round(settings.validation * len(images)))
    validation, training = np.sort(chosen[:held]), chosen[held:]
    if len(training) < 2:
        raise DataError(
            f"the public set holds {len(images)} images, the classifier needs two or more beside those for validation: "
            "give it more"
        )
    device = compute.device().type
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_network(settings.network, images.shape, len(images.classes), settings.width)
        if isinstance(model, WhitenedCNN):
            model.whiten(images.batch(np.sort(training[:WHITENED_BY]))[0])
        model = model.to(device).train()
        optimizer = optimizer_of(model, settings.learning_rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=settings.learning_rate,
            total_steps=settings.steps,
            pct_start=WARM_UP,
            cycle_momentum=settings.network == "residual",
        )
        batches = shuffled(training, settings.batch, order)
        for step in range(settings.steps):
            pixels, labels = images.batch(next(batches))
            pixels = augment(pixels, flip=images.shape[0] == 3)
            with torch.autocast(device, torch.bfloat16, enabled=fast_bfloat16(device)):
                loss = F.cross_entropy(model(pixels.to(device)), labels.to(device), label_smoothing=LABEL_SMOOTHING)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            progress(step + 1, settings.steps)
    return model.eval(), accuracy(model, images, validation)


def optimizer_of(model: PublicNetwork, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW for the residual network, SGD with Nesterov momentum for the whitened one.

    Weight matrices decay; scales and offsets do not.
    """
    whitened, parameters = isinstance(model, WhitenedCNN), list(model.parameters())
    matrices, others = ([value for value in parameters if (value.ndim > 1) == wanted] for wanted in (True, False))
    decay = WHITENED_DECAY if whitened else WEIGHT_DECAY
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    if whitened:
        return torch.optim.SGD(groups, lr=learning_rate, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=learning_rate)


def shuffled(indices: np.ndarray, batch: int, order: np.random.Generator) -> Iterator[np.ndarray]:
    """Endless batches, in a new order in each pass. A pass leaves out an incomplete last batch.

    Each batch is sorted, which reads faster from disk.
    """
    batch = min(batch, len(indices))
    while True:
        indices = order.permutation(indices)
        for start in range(0, len(indices) - batch + 1, batch):
            yield np.sort(indices[start : start + batch])


def augment(images: Tensor, flip: bool) -> Tensor:
    """Shift each image of (B, C, H, W) by up to 1/SHIFT of its side, with edges repeated.

    flip: mirror each image with probability 1/2.
    """
    count, _, height, width = images.shape
    rows, columns = (  # (B, H), (B, W): where each pixel comes from
        (torch.arange(size) - torch.randint(-(size // SHIFT), size // SHIFT + 1, (count, 1))).clamp(0, size - 1)
        for size in (height, width)
    )
    if flip:
        columns = torch.where(torch.rand(count, 1) < 0.5, columns.flip(1), columns)
    shifted = images.gather(2, rows[:, None, :, None].expand(images.shape))
    return shifted.gather(3, columns[:, None, None, :].expand(images.shape))


@torch.no_grad()
def accuracy(model: PublicNetwork, images: ImageSet, indices: np.ndarray) -> float:
    """Share of the images at `indices` that the model labels correctly, in [0, 1]."""
    device, right = next(model.parameters()).device, 0
    for start in range(0, len(indices), SCORED):
        pixels, labels = images.batch(indices[start : start + SCORED])
        right += int((model(pixels.to(device)).argmax(1).cpu() == labels).sum())
    return right / len(indices)
