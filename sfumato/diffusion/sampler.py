"""Drawing images: Heun's second-order solver of the probability-flow ODE, with classifier-free guidance.

Source: EDM, Algorithm 1 (deterministic) and Eq. 5 for the noise levels; Ho & Salimans 2021 for guidance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfumato.diffusion.objective import denoise, to_image_range

if TYPE_CHECKING:
    from sfumato.diffusion.unet import UNet

SIGMA_MIN, SIGMA_MAX, RHO = 0.002, 80.0, 7.0


def noise_schedule(steps: int) -> Tensor:
    """The noise levels visited: `steps` of them from SIGMA_MAX down to SIGMA_MIN, then 0. (steps + 1,) float32."""
    if steps < 1:
        raise ValueError(f"steps={steps}: expected at least 1")
    ramp = torch.linspace(0, 1, steps) if steps > 1 else torch.zeros(1)
    levels = (SIGMA_MAX ** (1 / RHO) + ramp * (SIGMA_MIN ** (1 / RHO) - SIGMA_MAX ** (1 / RHO))) ** RHO
    return torch.cat([levels, torch.zeros(1)])


@torch.no_grad()
def sample(
    model: UNet,
    labels: Tensor,
    steps: int = 18,
    guidance: float = 0.0,
    generator: torch.Generator | None = None,
    batch: int = 256,
    autocast: bool = False,
) -> Tensor:
    """One image for each label.

    labels: (N,) int64; steps: solver steps (2·steps − 1 network evaluations, twice that when guided); guidance g: the
    denoiser D becomes D + g·(D − D_unconditional), 0 is none; generator: a CPU one, which fixes the images (up to
    rounding) whatever `batch` and the device are; batch: images at a time; autocast: run the network in bfloat16.
    Returns (N, C, H, W) float32 in [0, 1] on the CPU.
    """
    device = next(model.parameters()).device
    shape = (model.channels, model.resolution, model.resolution)
    training = model.training
    model.eval()
    images = [torch.empty(0, *shape)]
    for part in labels.split(batch):
        # One image's noise at a time, so that the k-th image does not depend on `batch`.
        start = torch.cat([torch.empty(0, *shape), *(torch.randn(1, *shape, generator=generator) for _ in part)])
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            images.append(to_image_range(solve(model, start.to(device), part.to(device), steps, guidance)).cpu())
    model.train(training)
    return torch.cat(images)


def solve(model: UNet, noise: Tensor, labels: Tensor, steps: int, guidance: float) -> Tensor:
    """Heun's method from `noise` (standard normal, (B, C, H, W)) to σ = 0. Returns (B, C, H, W) in about [-1, 1]."""
    sigmas = noise_schedule(steps).tolist()
    x = noise * sigmas[0]
    for sigma, following in itertools.pairwise(sigmas):
        slope = (x - guided(model, x, sigma, labels, guidance)) / sigma
        euler = x + (following - sigma) * slope
        if following > 0:
            ahead = (euler - guided(model, euler, following, labels, guidance)) / following
            x = x + (following - sigma) * (slope + ahead) / 2
        else:
            x = euler
    return x


def guided(model: UNet, x: Tensor, sigma: float, labels: Tensor, guidance: float) -> Tensor:
    """D at one noise level, guided."""

    def denoised(x: Tensor, labels: Tensor) -> Tensor:
        return denoise(model, x, x.new_full((len(x),), sigma), labels, model.sigma_data)

    return with_guidance(denoised, x, labels, model.classes, guidance)


def with_guidance(
    network: Callable[[Tensor, Tensor], Tensor], x: Tensor, labels: Tensor, no_label: int, guidance: float
) -> Tensor:
    """D + g·(D − D_unconditional), the two in one pass of the network: (x, labels) -> D."""
    if guidance == 0:
        return network(x, labels)
    both = torch.cat([labels, torch.full_like(labels, no_label)])
    conditional, unconditional = network(torch.cat([x, x]), both).chunk(2)
    return conditional + guidance * (conditional - unconditional)
