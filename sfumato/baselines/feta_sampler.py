"""FETA-Pro's ablations without its one-step generator: a denoiser is fitted to the release through its own sampler.

It draws the auxiliary images (recipe feta-pro-dm), or a phase of the warm-up fits the synthesizer itself
(feta-pro-no-aux). All of it is post-processing.
Source: FETA-Pro, Appendix C.1 (there DDIM with 50 steps).
"""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.data.images import Shape
from sfumato.diffusion.ema import ema_model
from sfumato.diffusion.sampler import guided, noise_schedule
from sfumato.diffusion.unet import UNet
from sfumato.generators.one_step import Match, built, fit_generator, load_generator
from sfumato.runtime import distributed
from sfumato.settings.training import Fit, Pretrain
from sfumato.training.curriculum import Sources, warm_up

STEPS = 4  # of the sampler


class SampledGenerator(nn.Module):
    """G(z, y): STEPS Euler steps of the denoiser's ODE (DDIM) from z, taken as noise; differentiable.

    latent: size of z, that of an image.
    """

    def __init__(self, model: UNet) -> None:
        super().__init__()
        self.model, self.classes = model, model.classes
        self.latent, self.blocks = math.prod(model.shape), (1,)

    def forward(self, z: Tensor, labels: Tensor, block: int = 1) -> Tensor:
        """z: (B, latent); labels: (B,) int64 below `classes`; block: 1. Returns (B, C, H, W) float32, about [0, 1].

        It is not clamped to [0, 1]: a pixel beyond would get no gradient.
        """
        sigmas = noise_schedule(STEPS).tolist()
        x = z.view(len(z), *self.model.shape) * sigmas[0]
        for sigma, following in itertools.pairwise(sigmas):
            x = x + (following - sigma) * (x - guided(self.model, x, sigma, labels, 0.0)) / sigma
        return (x + 1) / 2

    def config(self) -> dict[str, Any]:
        """The arguments of its network, and its steps."""
        return {"solver": STEPS, "network": self.model.arguments}


def new_sampled(shape: Shape, classes: int, width: int, seed: int) -> SampledGenerator:
    """A freshly initialised diffusion model of images of `shape`, as a generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SampledGenerator(UNet(shape[1:], shape[0], classes, width=width, multipliers=(1, 1), attention=()))


def load_drawing(directory: Path) -> Any:
    """The generator that `stage auxiliary` wrote, of any kind, in eval mode. Raises DataError as `load_generator`."""

    def build(**found: Any) -> Any:
        return SampledGenerator(UNet(**found["network"])) if "network" in found else built(**found)

    return load_generator(directory, build)


def fit_phases(
    model: UNet,
    settings: Pretrain,
    sources: Sources,
    match: Match,
    priors: Tensor,
    seed: int,
    report: Callable[[int, int], None] = lambda done, total: None,
    *,
    label_dropout: float = 0.1,
) -> None:
    """Train `model` in place through all phases, of which those with the source "frequency" fit it to the release.

    match: the release; priors: (classes,) public label shares. Each run of denoising phases ends in their average.
    """
    whole, done = sum(phase.steps for phase in settings.phases), 0
    for fits, group in itertools.groupby(settings.phases, key=lambda phase: phase.fits):
        phases = list(group)

        def progress(part: int, of: int, before: int = done) -> None:
            report(before + part, whole)

        if fits:
            for phase in phases:
                how = Fit(steps=phase.steps, batch=phase.batch, learning_rate=phase.learning_rate)
                fit_generator(SampledGenerator(model), [match], how, priors, seed, progress)
            distributed.agree(model.state_dict().values())
        else:
            ema_model(model, warm_up(model, phases, sources, seed, progress, label_dropout=label_dropout))
        done += sum(phase.steps for phase in phases)
