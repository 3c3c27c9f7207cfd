"""Settings of Private Evolution and DP-GAN."""

from typing import ClassVar, Literal

from sfumato.settings.fields import Norm, Positive, machine
from sfumato.settings.noise import Noise, QuerySettings
from sfumato.settings.noise_levels import LogNormal

Warming = Literal["evolve"]  # whose images a phase of the warm-up may show
Drawable = Literal["evolve", "adversarial"]  # whose images may be released


class Evolve(QuerySettings):
    """Private Evolution: candidates of a public renderer, and votes of the images for the nearest."""

    releases: ClassVar[str] = "rounds"
    generator: ClassVar[str] = "glyphs"  # the renderer, whose parameters vary
    feature: ClassVar[str] = "pixels"  # the space of the distances
    dimension: ClassVar[int] = 256  # principal directions of the features, at most; unscaled
    threshold: ClassVar[float] = 1.0  # votes up to so many standard deviations of the noise count as none
    variation: ClassVar[tuple[float, float]] = (0.3, 0.05)  # how far genes move, in the first and in the last round
    noise: Noise = 20.0
    rounds: Positive = 10  # T
    population: Positive = 620  # candidates of all classes together
    images: Positive = 10_000  # of the last generation, which is released


class Adversarial(QuerySettings):
    """A discriminator by DP-SGD, and the generator that it teaches at no cost (DP-GAN)."""

    releases: ClassVar[str] = "steps"
    draws: ClassVar[int] = 1  # noise levels per image
    noise_levels: ClassVar[LogNormal] = LogNormal(mean=-2.0, std=0.5)  # of all images that the discriminator sees
    learning_rate: ClassVar[float] = 2e-3  # of the discriminator
    generator_rate: ClassVar[float] = 2e-3  # learning rate of the generator
    betas: ClassVar[tuple[float, float]] = (0.5, 0.99)  # of both Adams: a short memory, for the other network changes
    fakes: ClassVar[int] = 200  # generated images of a step
    latent: ClassVar[int] = 32  # random numbers of a generated image
    width: ClassVar[int] = 16  # channels of the generator at half resolution
    discriminator: ClassVar[int] = 16  # channels of its first layer
    images: ClassVar[int] = 10_000  # drawn at the end, to look at: a release draws its own
    noise: Noise = "5%"
    steps: Positive = 300  # one for each network
    batch: Positive = 500  # expected images per step: sample_rate = batch / size_hint
    max_grad_norm: Norm = 1.0  # C, the L2 clip of one image's gradient
    microbatch_size: Positive | None = machine(None)  # images whose gradients are taken together; None: what fits
    checkpoint_every: Positive = machine(10)  # steps
