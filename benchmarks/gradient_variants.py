"""The variants of a step whose speed is compared: a plain step, ours, and Opacus'. The images are random.

Each maker takes a setting and returns a step, which makes `passes` image passes (forward and backward of one image at
one noise level) on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sfumato.diffusion.noise_levels import draw_noise_levels
from sfumato.diffusion.objective import per_image_loss
from sfumato.diffusion.unet import GroupNorm, UNet
from sfumato.dpsgd.gradients import clipped_gradient_sum, draw
from sfumato.dpsgd.microbatch import choose_microbatch
from sfumato.settings.noise_levels import LogNormal

CLIP = 1e-3


@dataclass(frozen=True, kw_only=True)
class Setting:
    passes: int = 256  # image passes of a step
    size: int = 28  # pixels
    channels: int = 1  # of the images
    width: int = 32  # channels of the finest level: kernels are fastest at multiples of 32
    unshuffle: int = 2
    blocks: int = 1
    opacus_rows: int = 64  # rows whose gradients Opacus holds at a time

    def network(self, device: str = "cpu") -> UNet:
        torch.manual_seed(0)
        shape = self.size, self.channels, 10, self.width, (2, 2), (1,)
        model = UNet(*shape, blocks=self.blocks, unshuffle=self.unshuffle)
        with torch.no_grad():
            for parameter in model.parameters():  # away from the zero initialisation, where most gradients vanish
                parameter.add_(0.02 * torch.randn_like(parameter))
        return model.to(device)

    def data(self, images: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        pictures = torch.rand(images, self.channels, self.size, self.size, generator=generator)
        return pictures.to(device), torch.randint(10, (images,), generator=generator).to(device)


def plain(setting: Setting, autocast: bool, device: str = "cpu", batch: int | None = None) -> Callable[[], object]:
    """The gradient of an ordinary training step, of all passes or, where memory is short, of `batch` at a time."""
    model = setting.network(device)
    (images, labels), generator = setting.data(setting.passes, device), torch.Generator(device).manual_seed(0)
    parameters = list(model.parameters())

    def step() -> object:
        total: tuple[Tensor, ...] = ()
        for x, y in zip(images.split(batch or len(images)), labels.split(batch or len(images)), strict=True):
            noise = torch.randn(x.shape, generator=generator, device=device)
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                loss = per_image_loss(model, x, y, draw_noise_levels(LogNormal(), len(x), generator), noise).mean()
            found = torch.autograd.grad(loss, parameters)
            total = tuple(map(torch.add, total, found)) if total else found
        return total

    return step


def ours(
    setting: Setting,
    draws: int,
    autocast: bool,
    device: str = "cpu",
    chunk: int | None = None,
    draws_per_pass: int | None = None,
    unfolds: bool = False,
) -> Callable[[], object]:
    """Draws, per-image gradients, clip and sum, as in DP-SGD. chunk: images at a time; None: as the machine chooses.

    unfolds: weight gradients of convolutions from unfolded images.
    """
    model, generator = setting.network(device), torch.Generator(device).manual_seed(0)
    images, labels = setting.data(setting.passes // draws, device)
    parameters, model.use_unfold = dict(model.named_parameters()), unfolds
    if chunk is None:
        chunk, draws_per_pass = choose_microbatch(model, parameters, draws, 2.0 * len(images))

    def step() -> object:
        drawn = draw(model, images, draws, LogNormal(), generator)
        return clipped_gradient_sum(
            model, parameters, images, labels, drawn, CLIP, chunk, autocast, draws_per_pass=draws_per_pass
        )

    return step


class OpacusNorm(nn.Module):
    """Group normalisation in modules that Opacus has rules for."""

    def __init__(self, groups: int, channels: int, affine: bool) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, affine=affine)

    def forward(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        return x if scale is None or shift is None else x * scale[:, :, None, None] + shift[:, :, None, None]


def opacus(setting: Setting, draws: int, device: str = "cpu") -> Callable[[], object]:
    """Opacus as it ships: its hooks, on modules it has rules for, and its optimiser's clip and sum, without noise.

    K draws are K rows, whose gradients are averaged before the optimiser sees them.
    """
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    passes, model = setting.passes, setting.network(device)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, GroupNorm):
                setattr(module, name, OpacusNorm(child.groups, child.channels, affine=child.affine).to(device))
    wrapped, rows = GradSampleModule(model), setting.opacus_rows
    images, labels = (tensor.repeat_interleave(draws, 0) for tensor in setting.data(passes // draws, device))
    generator = torch.Generator(device).manual_seed(0)
    parameters = list(wrapped.parameters())
    optimizer = DPOptimizer(
        torch.optim.SGD(parameters, lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        expected_batch_size=passes // draws,
    )

    def step() -> None:
        for start in range(0, passes, rows):
            x, y = images[start : start + rows], labels[start : start + rows]
            noise = torch.randn(x.shape, generator=generator, device=device)
            sigma = draw_noise_levels(LogNormal(), len(x), generator)
            per_image_loss(wrapped, x, y, sigma, noise).mean().backward()
            if draws > 1:
                for value in parameters:
                    value.grad_sample = value.grad_sample.unflatten(0, (-1, draws)).mean(1)
            optimizer.signal_skip_step(start + rows < passes)
            optimizer.step()
            optimizer.zero_grad()

    return step
