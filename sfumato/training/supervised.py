"""Supervised training of an image classifier: the loop, its schedule, and the accuracy."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.data.images import ImageSet, to_device
from sfumato.runtime.compute import device_of, fast_bfloat16
from sfumato.runtime.progress import Progress, no_progress

SHIFT = 8  # Augmentation shifts an image by at most 1/SHIFT of its side


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Schedule of a classifier's training, with AdamW or SGD and a one-cycle learning rate."""

    steps: int
    learning_rate: float  # peak of the cycle
    weight_decay: float
    batch: int = 128
    decay_vectors: bool = True  # whether weight decay includes scales and offsets
    sgd: bool = False  # whether to use SGD with Nesterov momentum instead of AdamW
    label_smoothing: float = 0.0
    # Whether to shift images a little, and to mirror colour images.
    # Grey images are not mirrored, because they may be letters.
    augment: bool = False
    soft: bool = False  # whether labels of shape (B, classes) are class probabilities


def train_supervised(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    schedule: Schedule,
    progress: Progress = no_progress,
) -> None:
    """Train `model` in place, on its device, and leave it in evaluation mode.

    batches: one batch per step, of images, (B, C, H, W) float32 in [0, 1], and labels. The labels
    are (B,) int64; or (B, classes) of 0 and 1, for a loss over independent labels; or, with
    `schedule.soft`, (B, classes) probabilities;
    progress: called with (steps done, all steps).
    """
    device = device_of(model)
    matrices = [value for value in model.parameters() if value.ndim > 1]
    vectors = [value for value in model.parameters() if value.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": schedule.weight_decay},
        {"params": vectors, "weight_decay": schedule.weight_decay * schedule.decay_vectors},
    ]
    optimizer: torch.optim.Optimizer
    if schedule.sgd:
        optimizer = torch.optim.SGD(groups, lr=schedule.learning_rate, momentum=0.9, nesterov=True)
    else:
        optimizer = torch.optim.AdamW(groups, lr=schedule.learning_rate)
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=schedule.learning_rate,
        # With 5 steps, the rise would be a single step, and the schedule would divide by zero
        total_steps=schedule.steps + (schedule.steps == 5),
        pct_start=0.2,
        cycle_momentum=not schedule.sgd,
    )
    model.train()
    for step, (images, labels) in enumerate(itertools.islice(batches, schedule.steps), start=1):
        images, labels = (to_device(part, device) for part in (images, labels))
        if schedule.augment:
            images = shift_and_mirror(images, mirror=images.shape[1] == 3)
        with torch.autocast(device.type, torch.bfloat16, enabled=fast_bfloat16(device.type)):
            logits = model(images)
            if labels.ndim == 2 and not schedule.soft:
                loss = F.binary_cross_entropy_with_logits(logits, labels.to(logits))
            else:
                loss = F.cross_entropy(logits, labels, label_smoothing=schedule.label_smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        rates.step()
        progress(step, schedule.steps)
    model.eval()


def shift_and_mirror(images: Tensor, mirror: bool, random: torch.Generator | None = None) -> Tensor:
    """Shift each image of (B, C, H, W) at random by up to 1/SHIFT of its sides.

    The pixels at the image's edges are repeated to fill the gap. mirror: whether to mirror each
    image with probability 1/2; random: generator to draw from, None for the global generator.
    """
    count, _, height, width = images.shape
    rows, columns = (  # (B, H), (B, W): row and column from which each pixel is taken
        (
            torch.arange(size)
            - torch.randint(-(size // SHIFT), size // SHIFT + 1, (count, 1), generator=random)
        ).clamp(0, size - 1)
        for size in (height, width)
    )
    if mirror:
        columns = torch.where(
            torch.rand(count, 1, generator=random) < 0.5, columns.flip(1), columns
        )
    rows, columns = (to_device(part, images.device) for part in (rows, columns))
    shifted = images.gather(2, rows[:, None, :, None].expand(images.shape))
    return shifted.gather(3, columns[:, None, None, :].expand(images.shape))


def to_tensor(images: np.ndarray, device: str) -> Tensor:
    """Convert (B, H, W, C) uint8 to (B, C, H, W) float32 in [0, 1], channels-last in memory."""
    tensor = torch.from_numpy(np.array(images, order="C")).to(device).permute(0, 3, 1, 2)
    return tensor.float().div_(255)


@torch.no_grad()
def apply(
    function: Callable[[Tensor], Tensor], images: np.ndarray, device: str, size: int = 1000
) -> np.ndarray:
    """Apply `function` to images, (N, H, W, C) uint8, in batches.

    function: takes (B, C, H, W) float32 in [0, 1]; size: maximum number of images per batch.
    Batches of large images are smaller, to limit the memory. Returns one float32 array.
    """
    size = min(size, max(1, 1000 * 64 * 64 // (images.shape[1] * images.shape[2])))
    parts = [images[start : start + size] for start in range(0, len(images), size)]
    return np.concatenate(
        [function(to_tensor(part, device)).float().cpu().numpy() for part in parts]
    )


def logits(model: nn.Module, images: np.ndarray) -> np.ndarray:
    """Switch to evaluation mode and compute logits: (N, H, W, C) uint8 -> (N, classes)."""
    return apply(model.eval(), images, device_of(model).type)


def accuracy(model: nn.Module, image_set: ImageSet) -> float:
    """Return the share of images that the model labels correctly, in [0, 1]."""
    return float((logits(model, image_set.images).argmax(axis=1) == image_set.labels).mean())
