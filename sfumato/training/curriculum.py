"""Warm-up: denoising training, phase by phase, on public and released images.

No function here reads sensitive images.

Source: DP-FETA §3.1 and FETA-Pro §3.2 ("from easy to hard"), RPGen §Stage 2.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sfumato.data.images import as_floats, to_device
from sfumato.diffusion.denoiser import draw_noise_levels
from sfumato.diffusion.ema import EMA
from sfumato.diffusion.unet import UNet
from sfumato.dpsgd.microbatch import plain_microbatch
from sfumato.runtime import distributed
from sfumato.runtime.compute import prefers_bfloat16
from sfumato.runtime.progress import Progress, no_progress
from sfumato.settings.noise_levels import LogNormal
from sfumato.settings.training import Phase
from sfumato.training.amp import amp_gradient


@dataclass(frozen=True)
class MappedImages:
    """Images in a memory map, with the indexing of a tensor.

    Only the images of a batch are read.

    images: (N, H, W, C) uint8;
    rows: (n,) int64 below N, the rows to use; None for all.
    """

    images: np.ndarray
    rows: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.images if self.rows is None else self.rows)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Read a batch, (B, C, H, W) uint8. rows: (B,) int64 below len(self)."""
        indices = rows.numpy() if self.rows is None else self.rows[rows.numpy()]
        return torch.from_numpy(np.array(self.images[indices])).permute(0, 3, 1, 2).contiguous()


Images = Tensor | MappedImages  # (N, C, H, W), uint8 or float32 in [0, 1]
# Images and labels of each source, by the name of the source.
# Labels are row numbers of the model's label table, (N,) int64. With several labels per image, they
# are 0 and 1, (N, classes).
Sources = Mapping[str, tuple[Images, Tensor]]

IMAGES_PER_DRAW = 2  # Number of images that get the same RandAugment operations


def warm_up(
    model: UNet,
    phases: Sequence[Phase],
    sources: Sources,
    seed: int,
    report: Progress = no_progress,
    *,
    label_dropout: float = 0.1,
) -> dict[str, Tensor]:
    """Train `model` in place through the phases, and return the average of its weights by name.

    Each phase starts a new Adam optimiser without weight decay. The average is an exponential
    moving average over the steps of all phases, so the last phase has the most weight.

    seed: fixes batches, noise and augmentation; report: called with (steps done, steps of all
    phases).
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    ema = EMA(parameters)
    model.train()
    total_steps = sum(phase.steps for phase in phases)
    microbatch = plain_microbatch(model, parameters)
    fast = distributed.broadcast_object(prefers_bfloat16(model))
    for phase in phases:
        optimiser = torch.optim.Adam(parameters.values(), lr=phase.learning_rate, fused=True)
        batches = drawn_batches(model, phase, sources, generator, label_dropout)
        if device.type == "cuda":
            batches = prefetch(batches)
        for step, batch in enumerate(batches, start=1):
            # Split into microbatches of at most `microbatch` images
            parts = (
                to_device(distributed.local_shard(tensor), device).split(microbatch)
                for tensor in batch
            )
            mean = functools.partial(mean_loss, model, autocast=fast, size=phase.batch)
            losses = functools.partial(map, mean, [*zip(*parts, strict=True)])
            # With adversarial model perturbation (`phase.amp`), the gradient is computed at nearby
            # weights with a higher loss.
            amp_gradient(parameters.values(), losses, phase.amp)
            optimiser.step()
            ema.update(parameters)
            if ema.steps % 20 == 0 or step == phase.steps:
                report(ema.steps, total_steps)
    return ema.average


def drawn_batches(
    model: UNet, phase: Phase, sources: Sources, generator: torch.Generator, label_dropout: float
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the batches of a phase, on the CPU. A batch is a tuple of the arguments of
    `UNet.per_image_loss`.
    """
    for _ in range(phase.steps):
        images, labels = mixed_batch(phase, sources, generator)
        if phase.augment:
            images = rand_augment(images, phase.augment, generator)
        labels = model.hidden(labels, torch.rand(len(labels), generator=generator) < label_dropout)
        sigma = draw_noise_levels(LogNormal(), len(images), generator)
        yield images, labels, sigma, torch.randn(images.shape, generator=generator)


def prefetch(batches: Iterator[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Prepare each batch in a thread while the previous one is used, so that a GPU waits less."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(next, batches, None)
        while (batch := future.result()) is not None:
            future = thread.submit(next, batches, None)
            yield batch


def mean_loss(model: UNet, batch: Sequence[Tensor], autocast: bool, size: int) -> Tensor:
    """Compute the loss of a microbatch: the sum over its images, divided by `size`.

    batch: the arguments of `per_image_loss`; size: number of images in the full batch, over all
    microbatches and processes.
    """
    images, labels, sigma, noise = batch
    with torch.autocast(images.device.type, torch.bfloat16, enabled=autocast):
        return model.per_image_loss(images, labels, sigma, noise).sum() / size


def mixed_batch(
    phase: Phase, sources: Sources, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw `phase.batch` images with replacement, each from a source that is drawn by weight.

    Returns the images, float32 in [0, 1], and their labels.
    """
    names = sorted(phase.sources)
    weights = torch.tensor([phase.sources[name] for name in names])
    choice = torch.multinomial(weights, phase.batch, replacement=True, generator=generator)
    images: list[Tensor] = []
    labels: list[Tensor] = []
    for index, name in enumerate(names):
        count = int((choice == index).sum())
        rows = torch.randint(len(sources[name][0]), (count,), generator=generator)
        images.append(as_floats(sources[name][0][rows]))
        labels.append(sources[name][1][rows])
    return torch.cat(images), torch.cat(labels)


def rand_augment(images: Tensor, operations: int, generator: torch.Generator) -> Tensor:
    """Apply `operations` randomly drawn operations of RandAugment to each image.

    They are drawn from RandAugment's 14 operations, with replacement. The images are split at
    random into groups of IMAGES_PER_DRAW, and all images of a group get the same operations.

    images: (N, C, H, W) float32 in [0, 1], which are rounded to 8 bits first. Returns images of the
    same shape and range, in the same order.

    Source: Cubuk et al. 2019, with torchvision's list of operations and its default magnitude.
    """
    from torchvision.transforms import InterpolationMode, RandAugment
    from torchvision.transforms.autoaugment import _apply_op

    # Images are grouped at random, because neighbours in a batch come from the same source
    order = torch.randperm(len(images), generator=generator)
    pixels = (images * 255).round().clamp(0, 255).to(torch.uint8)
    operation_generator = torch.Generator().manual_seed(
        int(torch.randint(2**62, (1,), generator=generator))
    )
    augment = RandAugment()
    bag = [*augment._augmentation_space(augment.num_magnitude_bins, images.shape[-2:]).items()]

    # Operations are drawn for each group, as in `RandAugment.forward`. Each operation is applied
    # later, to all images for which it was drawn. The global generator is not used, because this
    # function may run in a second thread.
    rounds: list[dict[tuple[str, float], list[Tensor]]] = [{} for _ in range(operations)]
    for group, groups_of in itertools.product(order.split(IMAGES_PER_DRAW), rounds):
        name, (magnitudes, signed) = bag[
            int(torch.randint(len(bag), (1,), generator=operation_generator))
        ]
        magnitude = float(magnitudes.expand(augment.num_magnitude_bins)[augment.magnitude])
        if signed and torch.randint(2, (1,), generator=operation_generator):
            magnitude = -magnitude
        groups_of.setdefault((name, magnitude), []).append(group)
    for groups_of in rounds:
        for (name, magnitude), groups in groups_of.items():
            rows = torch.cat(groups)
            pixels[rows] = _apply_op(pixels[rows], name, magnitude, InterpolationMode.NEAREST, None)
    return pixels.float() / 255
