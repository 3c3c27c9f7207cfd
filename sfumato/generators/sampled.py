"""A denoiser as a generator of one piece: from noise to an image through a few solver steps, differentiably.

So it can be fitted to a noisy release as the auxiliary generator is. All of it is post-processing.
Source: FETA-Pro, Appendix C.1: no auxiliary generator, or a diffusion model as one (with DDIM, 50 steps there).
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor, nn

from sfumato.diffusion.sampler import guided, noise_schedule
from sfumato.diffusion.unet import UNet


class SampledGenerator(nn.Module):
    """G(z, y): `solver` Euler steps of the denoiser's ODE (DDIM) from z, taken as noise. In the place of `Generator`.

    latent: size of z, that of an image.
    """

    def __init__(self, model: UNet, solver: int) -> None:
        super().__init__()
        self.model, self.solver = model, solver
        self.resolution, self.channels, self.classes = model.resolution, model.channels, model.classes
        self.latent = model.channels * model.resolution**2

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """z: (B, latent); labels: (B,) int64 below `classes`. Returns (B, C, H, W) float32, about [0, 1].

        It is not cut to [0, 1]: a pixel beyond would get no gradient back.
        """
        sigmas = noise_schedule(self.solver).tolist()
        x = z.view(len(z), self.channels, self.resolution, self.resolution) * sigmas[0]
        for sigma, following in itertools.pairwise(sigmas):
            x = x + (following - sigma) * (x - guided(self.model, x, sigma, labels, 0.0)) / sigma
        return (x + 1) / 2

    def config(self) -> dict[str, Any]:
        """The arguments that rebuild this generator, and those of its network."""
        return {"solver": self.solver, "network": self.model.arguments}
