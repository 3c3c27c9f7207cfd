"""Warm-up: denoising training, phase by phase, on images that are public or already paid for.

Nothing here touches sensitive images. Source: DP-FETA §3.1 and FETA-Pro §3.2 ("from easy to hard"), RPGen §Stage 2; METHODS §3, §4 and §6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sfumato.config import Phase, Pretrain
from sfumato.diffusion.ema import EMA
from sfumato.diffusion.objective import draw_noise_levels, per_image_loss
from sfumato.diffusion.unet import UNet
from sfumato.errors import ConfigError
from sfumato.precision import bfloat16_is_faster
from sfumato.warmup.amp import amp_gradient


class Images(Protocol):
    """(N, C, H, W), uint8 or float32 in [0, 1]: a tensor, or anything that gives copies of the rows asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, rows: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class MappedImages:
    """Rows of a memory map as `Images`: only what a batch asks for is ever read.

    images: (N, H, W, C) uint8; rows: (n,) int64 below N, those that count; None: all.
    """

    images: np.ndarray
    rows: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.images if self.rows is None else self.rows)

    def __getitem__(self, rows: Tensor, /) -> Tensor:
        """rows: (B,) int64 below len(self). Returns (B, C, H, W) uint8."""
        wanted = rows.numpy() if self.rows is None else self.rows[rows.numpy()]
        return torch.from_numpy(np.array(self.images[wanted])).permute(0, 3, 1, 2).contiguous()


Sources = Mapping[str, tuple[Images, Tensor]]  # name -> images; labels (N,) int64, rows of the model's label table
Progress = Callable[[int, int, int, float], None]  # phase, step in it (from 1), its steps, loss

GROUP = 2  # images that share a draw of RandAugment operations: a draw for each would cost a tenth of the training step
REPORT_EVERY = 20  # steps between two calls of the progress callback


def warm_up(
    model: UNet,
    phases: Sequence[Phase],
    sources: Sources,
    config: Pretrain,
    seed: int,
    progress: Progress | None = None,
    *,
    label_dropout: float = 0.1,
    autocast: bool | None = None,
) -> dict[str, Tensor]:
    """Train `model` in place through the phases, each with a fresh Adam (no weight decay), and return the average of its weights by name.

    config: `ema` and `noise_levels` are read; seed: fixes batches, noise and augmentation; label_dropout: share of images shown
    without label; autocast: bfloat16, None measures whether it is faster. An average over the whole curriculum, so that the
    last phase weighs most.
    Raises ConfigError when a phase names a source that is missing or empty.
    """
    for number, phase in enumerate(phases):
        for name in phase.sources:
            if name not in sources or not len(sources[name][0]):
                raise ConfigError(
                    f"pretrain.phases[{number}] wants images from {name!r}, but there are none: run it or drop the source"
                )
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    ema = EMA(parameters, config.ema)
    model.train()
    for number, phase in enumerate(phases):
        optimiser = torch.optim.Adam(parameters.values(), lr=phase.learning_rate)
        fast = plain_autocast(model, phase.batch) if autocast is None else autocast
        for step in range(1, phase.steps + 1):
            # a batch, its augmentation and its noise
            images, labels = mixed_batch(phase, sources, generator)
            if phase.augment:
                images = rand_augment(images, phase.augment, generator)
            labels = torch.where(torch.rand(len(labels), generator=generator) < label_dropout, model.classes, labels)
            sigma = draw_noise_levels(config.noise_levels, len(images), generator)
            noise = torch.randn(images.shape, generator=generator)

            # a step of Adam, on the gradient here or at the worst weights nearby
            batch = [tensor.to(device) for tensor in (images, labels, sigma, noise)]
            loss = amp_gradient(parameters.values(), functools.partial(mean_loss, model, batch, fast), phase.amp)
            optimiser.step()
            ema.update(parameters)
            if progress and (step % REPORT_EVERY == 0 or step == phase.steps):
                progress(number, step, phase.steps, loss.item())
    return ema.average


def mean_loss(model: UNet, batch: Sequence[Tensor], autocast: bool) -> Tensor:
    """The training loss of a batch already drawn: images, labels, sigma, noise, as `per_image_loss` takes them."""
    images, labels, sigma, noise = batch
    with torch.autocast(images.device.type, torch.bfloat16, enabled=autocast):
        return per_image_loss(model, images, labels, sigma, noise, model.sigma_data).mean()


def mixed_batch(phase: Phase, sources: Sources, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`phase.batch` images drawn with replacement, the source of each by weight. Returns float32 in [0, 1] and labels."""
    names = sorted(phase.sources)
    weights = torch.tensor([phase.sources[name] for name in names])
    choice = torch.multinomial(weights, phase.batch, replacement=True, generator=generator)
    images, labels = [], []
    for index, name in enumerate(names):
        count = int((choice == index).sum())
        rows = torch.randint(len(sources[name][0]), (count,), generator=generator)
        images.append(as_float(sources[name][0][rows]))
        labels.append(sources[name][1][rows])
    return torch.cat(images), torch.cat(labels)


def as_float(images: Tensor) -> Tensor:
    """uint8 to [0, 1]; float32 stays."""
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def rand_augment(images: Tensor, operations: int, generator: torch.Generator) -> Tensor:
    """`operations` of the 14 RandAugment operations on each image, drawn anew for every GROUP images.

    images: (N, C, H, W) float32 in [0, 1]; goes through 8 bits. Returns the same shape and range, in the same order.
    Source: Cubuk et al. 2019, with torchvision's bag and its default magnitude.
    """
    from torchvision.transforms import RandAugment

    augment = RandAugment(num_ops=operations)
    # groups of a random order: neighbours of a batch come from the same source
    order = torch.randperm(len(images), generator=generator)
    pixels = (images * 255).round().clamp(0, 255).to(torch.uint8)
    with torch.random.fork_rng(devices=[]):  # torchvision draws from the global generator
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        for group in order.split(GROUP):
            pixels[group] = augment(pixels[group])
    return pixels.float() / 255


def plain_autocast(model: UNet, batch: int) -> bool:
    """Is a plain training step faster in bfloat16 here? Timed on noise, gradients thrown away."""
    device = next(model.parameters()).device
    shape = (batch, model.channels, model.resolution, model.resolution)
    parameters = [value for value in model.parameters() if value.requires_grad]

    def step(autocast: bool) -> None:
        images = torch.zeros(shape, device=device)
        labels = torch.zeros(batch, dtype=torch.int64, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = per_image_loss(
                model, images, labels, torch.ones(batch, device=device), torch.ones_like(images)
            ).mean()
        torch.autograd.grad(loss, parameters)

    return bfloat16_is_faster(step, ("plain", device, shape, sum(value.numel() for value in parameters)), device)
