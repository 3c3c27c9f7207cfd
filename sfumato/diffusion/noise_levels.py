"""The laws that noise levels are drawn from.

Source: Karras et al. 2022 (EDM) for the log-normal; DP-Diffusion §3.3 for the mixture of timesteps.
"""

import functools

import torch
from torch import Tensor

from sfumato.settings.noise_levels import NoiseLevels, TimestepMixture

TIMESTEPS = 1000
FIRST_BETA, LAST_BETA = 1e-4, 0.02  # Ho et al. 2020 (DDPM)


def draw_noise_levels(law: NoiseLevels, n: int, generator: torch.Generator) -> Tensor:
    """n independent noise levels σ of the law, (n,) float32, on the generator's device.

    ln σ ~ N(mean, std²), or σ(t) of the linear DDPM schedule, t as `draw_timesteps` gives it.
    """
    if isinstance(law, TimestepMixture):
        return schedule(generator.device)[draw_timesteps(law, n, generator, TIMESTEPS)]
    return (law.mean + law.std * torch.randn(n, generator=generator, device=generator.device)).exp()


def draw_timesteps(law: TimestepMixture, n: int, generator: torch.Generator, steps: int) -> Tensor:
    """n timesteps, uniform on {lᵢ, …, uᵢ − 1} with probability wᵢ/Σw: (n,) int64 below `steps`.

    The bounds are of TIMESTEPS, and stretched to `steps`.
    """
    device = generator.device
    if n == 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    weights, bounds = mixture(law, device)
    bounds = bounds * (steps / TIMESTEPS)
    part = torch.multinomial(weights, n, replacement=True, generator=generator)
    # float64, floored: the uniform draw stays below 1, so t stays below its upper bound
    uniform = torch.rand(n, generator=generator, device=device, dtype=torch.float64)
    return (bounds[part] + uniform * (bounds[part + 1] - bounds[part])).floor().long().clamp(max=steps - 1)


@functools.cache
def mixture(law: TimestepMixture, device: torch.device) -> tuple[Tensor, Tensor]:
    """The weights, (n,), and the bounds, (n + 1,) float64, of a law, sent to the device once."""
    return torch.tensor(law.weights, device=device), torch.tensor(law.bounds, device=device, dtype=torch.float64)


@functools.cache
def schedule(device: torch.device) -> Tensor:
    """σ(t) = √((1 − ᾱ)/ᾱ) for t = 0..999 under linear betas. (1000,) float32, rising from 0.01 to about 157."""
    betas = torch.linspace(FIRST_BETA, LAST_BETA, TIMESTEPS, dtype=torch.float64)
    alphas_cumprod = (1 - betas).cumprod(0)
    return ((1 - alphas_cumprod) / alphas_cumprod).sqrt().float().to(device)
