"""Build training steps to compare their speed: a plain step, ours, and one with Opacus.

`plain`, `ours`, `graphed` and `opacus` take a setting and return a step. A step makes `passes`
image passes (forward and backward of one image at one noise level) over random images on the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sfumato.diffusion import unet
from sfumato.diffusion.denoiser import draw_noise_levels
from sfumato.diffusion.objective import per_image_loss
from sfumato.diffusion.unet import GroupNorm, UNet, build_unet
from sfumato.dpsgd.clip import clipped_sum
from sfumato.dpsgd.gradients import Microbatch, clipped_gradient_sum, draw, per_image_gradients
from sfumato.dpsgd.microbatch import choose_microbatch
from sfumato.settings.noise_levels import LogNormal
from sfumato.settings.training import Architecture

CLIP = 1e-3


@dataclass(frozen=True, kw_only=True)
class Setting:
    passes: int = 256  # image passes per step
    size: int = 28  # pixels
    channels: int = 1  # channels of the images
    width: int = 32  # channels of the finest level; kernels are fastest at multiples of 32
    deepest: int = 2  # multiplier of the deepest level's channels
    unshuffle: Literal[1, 2, 4] = 2
    blocks: int = 1
    opacus_rows: int = 64  # gradients that Opacus has in memory at a time

    def network(self, device: str = "cpu") -> UNet:
        torch.manual_seed(0)
        architecture = Architecture(
            width=self.width,
            multipliers=(2, self.deepest),
            blocks=self.blocks,
            unshuffle=self.unshuffle,
        )
        model = UNet(self.size, self.channels, 10, architecture)
        with torch.no_grad():
            # at the zero initialisation, most gradients vanish
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        return model.to(device)

    def data(self, images: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        pictures = torch.rand(images, self.channels, self.size, self.size, generator=generator)
        return pictures.to(device), torch.randint(10, (images,), generator=generator).to(device)


def gflop(model: UNet) -> float:
    """Count the GFLOP of one image's forward and backward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    meta = build_unet(**model.arguments).to("meta")
    images = torch.zeros(2, *model.shape, device="meta")
    levels, labels = torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counted:
        meta(images, levels, labels).sum().backward()
    return counted.get_total_flops() / 2e9


@contextmanager
def norms_in_bfloat16() -> Iterator[None]:
    """Return a context in which group normalisation is computed in its input's type.

    Outside this context, CUDA's autocast computes it in float32.
    """
    honest = unet.normalised

    def lean(x: Tensor, groups: int, scale: Tensor, shift: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return honest(x, groups, scale, shift)

    unet.normalised = lean
    try:
        yield
    finally:
        unet.normalised = honest


def plain(
    setting: Setting,
    autocast: bool,
    device: str = "cpu",
    batch: int | None = None,
    channels_last: bool = False,
    compiled: bool = False,
) -> Callable[[], object]:
    """Build an ordinary training step, without per-image gradients.

    batch: images at a time, if memory is short; None for all.
    compiled: whether `torch.compile` chooses the kernels.
    """
    model = setting.network(device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    (images, labels), generator = (
        setting.data(setting.passes, device),
        torch.Generator(device).manual_seed(0),
    )
    parameters = list(model.parameters())
    network: Any = model
    if compiled:
        network = torch.compile(model, mode="max-autotune-no-cudagraphs")

    def step() -> object:
        total: tuple[Tensor, ...] = ()
        for x, y in zip(
            images.split(batch or len(images)), labels.split(batch or len(images)), strict=True
        ):
            noise = torch.randn(x.shape, generator=generator, device=device)
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                loss = per_image_loss(
                    network, x, y, draw_noise_levels(LogNormal(), len(x), generator), noise
                ).mean()
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
    products: bool = False,
) -> Callable[[], object]:
    """Build a step of DP-SGD without noise: draws, per-image gradients, clip and sum.

    chunk: images at a time; None to choose it for this machine; products: whether to compute the
    weight gradients of convolutions by matrix products.
    """
    model, generator = setting.network(device), torch.Generator(device).manual_seed(0)
    images, labels = setting.data(setting.passes // draws, device)
    parameters, model.use_products = dict(model.named_parameters()), products
    if chunk is None:
        chunk, draws_per_pass = choose_microbatch(model, parameters, draws, 2.0 * len(images))
    part = Microbatch(chunk, draws_per_pass, autocast)

    def step() -> object:
        drawn = draw(model, images, draws, LogNormal(), generator)
        return clipped_gradient_sum(model, parameters, images, labels, drawn, CLIP, part)

    return step


def graphed(setting: Setting, draws: int, chunk: int) -> Callable[[], Tensor]:
    """Capture one chunk as a CUDA graph, and build a step that replays the graph for each chunk.

    So no Python runs between the kernels of a chunk.
    """
    model, generator = setting.network("cuda"), torch.Generator("cuda").manual_seed(0)
    images, labels = setting.data(setting.passes // draws, "cuda")
    parameters = dict(model.named_parameters())
    x, y = images[:chunk].clone(), labels[:chunk].clone()
    drawn = draw(model, x, draws, LogNormal(), generator)
    total = torch.zeros(sum(value.numel() for value in parameters.values()), device="cuda")

    def once() -> None:
        total.add_(clipped_sum(per_image_gradients(model, parameters, x, y, drawn, True), CLIP))

    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                once()
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            once()

    @torch.no_grad()
    def step() -> Tensor:
        fresh = draw(model, images, draws, LogNormal(), generator)
        total.zero_()
        for start in range(0, len(images) - chunk + 1, chunk):
            piece = slice(start, start + chunk)
            x.copy_(images[piece])
            y.copy_(labels[piece])
            for name, value in vars(drawn).items():
                value.copy_(vars(fresh)[name][piece])
            captured.replay()
        return total

    step()
    expected = clipped_gradient_sum(
        model, parameters, x, y, drawn, CLIP, Microbatch(chunk, autocast=True)
    )
    total.zero_()
    captured.replay()
    if float((total - expected).norm()) > 1e-2 * float(expected.norm()):
        raise RuntimeError("the CUDA graph and the ordinary step compute different sums")
    return step


class OpacusNorm(nn.Module):
    """Group normalisation built from modules that Opacus supports."""

    def __init__(self, groups: int, channels: int, affine: bool) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, affine=affine)

    def forward(
        self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None
    ) -> Tensor:
        x = self.norm(x)
        return (
            x
            if scale is None or shift is None
            else x * scale[:, :, None, None] + shift[:, :, None, None]
        )


def opacus(setting: Setting, draws: int, device: str = "cpu") -> Callable[[], object]:
    """Build a step with Opacus's hooks and with its optimiser, which clips and sums without noise.

    Modules that Opacus does not support are replaced. Each of the K draws of an image is one row of
    a batch. The gradients of these K rows are averaged, then the optimiser clips the average.
    """
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    passes, model = setting.passes, setting.network(device)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, GroupNorm):
                setattr(
                    module,
                    name,
                    OpacusNorm(child.groups, child.channels, affine=child.affine).to(device),
                )
    wrapped, rows = GradSampleModule(model), setting.opacus_rows
    images, labels = (
        tensor.repeat_interleave(draws, 0) for tensor in setting.data(passes // draws, device)
    )
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
