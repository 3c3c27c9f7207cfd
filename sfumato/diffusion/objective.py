"""What the denoiser learns: EDM preconditioning, weighting and the laws of the noise level.

Source: Karras et al. 2022 (EDM), Table 1; DP-Diffusion §3.3 for the mixture of timesteps. Inside this package images live in
[-1, 1] (`to_model_range`); everywhere else they live in [0, 1].
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from sfumato.config import LogNormal, TimestepMixture

Network = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, c_noise, labels) -> F, as `UNet.forward`

TIMESTEPS = 1000
FIRST_BETA, LAST_BETA = 1e-4, 0.02  # Ho et al. 2020 (DDPM)


def to_model_range(images: Tensor) -> Tensor:
    """[0, 1] to [-1, 1]."""
    return images * 2 - 1


def to_image_range(x: Tensor) -> Tensor:
    """[-1, 1] to [0, 1], clamped."""
    return ((x + 1) / 2).clamp(0, 1)


def denoise(network: Network, noisy: Tensor, sigma: Tensor, labels: Tensor, sigma_data: float = 0.5) -> Tensor:
    """The denoiser D(x; σ) = c_skip·x + c_out·F(c_in·x; ln σ / 4), an estimate of the clean image.

    noisy: (B, C, H, W), clean image in [-1, 1] plus σ times a standard normal; sigma: (B,), positive; labels: (B,) int64,
    where the number of classes means no label. Returns (B, C, H, W) float32.
    Source: EDM Eq. 7 and Table 1.
    """
    s = sigma.float()[:, None, None, None]
    total = (s**2 + sigma_data**2).sqrt()
    output = network(noisy / total, sigma.float().log() / 4, labels).float()
    return noisy * (sigma_data / total) ** 2 + output * (s * sigma_data / total)


def per_image_loss(
    network: Network, images: Tensor, labels: Tensor, sigma: Tensor, noise: Tensor, sigma_data: float = 0.5
) -> Tensor:
    """Weighted denoising error λ(σ)·mean((D(x + σn; σ) − x)²) with λ = (σ² + σ_data²)/(σ·σ_data)².

    images: (B, C, H, W) float32 in [0, 1]; labels, sigma: (B,); noise: (B, C, H, W), standard normal. Returns (B,) float32.
    Source: EDM Eq. 8.
    """
    clean = to_model_range(images)
    noisy = clean + sigma[:, None, None, None] * noise
    error = (denoise(network, noisy, sigma, labels, sigma_data) - clean).square().mean(dim=(1, 2, 3))
    return error * (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2


def draw_noise_levels(law: LogNormal | TimestepMixture, n: int, generator: torch.Generator) -> Tensor:
    """n independent noise levels σ of the law, (n,) float32, on the generator's device.

    Log-normal: ln σ ~ N(mean, std²). Timesteps: t uniform on {lᵢ, …, uᵢ − 1} with probability wᵢ/Σw, then σ(t) of the linear
    DDPM schedule.
    """
    device = generator.device
    if isinstance(law, LogNormal):
        return (law.mean + law.std * torch.randn(n, generator=generator, device=device)).exp()
    if n == 0:
        return torch.empty(0, device=device)
    bounds = torch.tensor(law.bounds, device=device)
    part = torch.multinomial(torch.tensor(law.weights, device=device), n, replacement=True, generator=generator)
    low, high = bounds[part], bounds[part + 1]
    # float64, floored: the uniform draw stays below 1, so t stays below its upper bound
    uniform = torch.rand(n, generator=generator, device=device, dtype=torch.float64)
    t = low + (uniform * (high - low)).floor().long()
    return schedule().to(device)[t]


@functools.cache
def schedule() -> Tensor:
    """σ(t) = √((1 − ᾱ)/ᾱ) for t = 0..999 under linear betas. (1000,) float32, rising from 0.01 to about 157."""
    betas = torch.linspace(FIRST_BETA, LAST_BETA, TIMESTEPS, dtype=torch.float64)
    kept = (1 - betas).cumprod(0)
    return ((1 - kept) / kept).sqrt().float()
