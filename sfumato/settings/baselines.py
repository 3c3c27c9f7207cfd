"""Settings of Private Evolution and DP-GAN."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sfumato.settings.dpsgd import Descent
from sfumato.settings.fields import Fraction, Positive, PositiveFloat, Settings, Strength
from sfumato.settings.noise import Noise, QuerySettings
from sfumato.settings.noise_levels import LogNormal, NoiseLevels


class Denoiser(Settings):
    """A diffusion model trained on the public set, and on nothing else: a generator that `evolve` may ask.

    It has the network of `model`, and the public classes in the place of the sensitive ones.
    """

    steps: Positive = 4000
    batch: Positive = 64
    learning_rate: PositiveFloat = 1e-3
    ema: Fraction = 0.999


class Evolve(QuerySettings):
    """Private Evolution: candidates of a public generator, and votes of the images for the nearest (METHODS §13).

    `glyphs`, `procedural` and `photos` are renderers, whose parameters vary; `denoiser` is the model of that stage,
    which noises an image and denoises it again.
    """

    chooser: ClassVar[str] = "generator"
    releases: ClassVar[str] = "rounds"
    noise: Noise = 20.0
    generator: Literal["glyphs", "procedural", "photos", "denoiser"] = "glyphs"
    feature: str = "pixels"  # the network that `classifier` trained, or one of FEATURES: where nearness is measured
    dimension: Positive = 256  # of the features, at most
    power: Annotated[float, Field(ge=0, le=1)] = 0.0  # directions are scaled by variance^(−power/2)
    rounds: Positive = 10  # T
    batch: Positive | None = None  # expected images a round: sample_rate = batch / size_hint; None: all, sample_rate 1
    population: Positive = 620  # candidates of all classes together
    images: Positive = 10_000  # of the last generation, which is released
    within_class: bool = True  # an image votes for candidates of its class alone; else for any, in the row of its class
    threshold: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0  # in standard deviations of the noise
    lookahead: Annotated[int, Field(ge=0)] = 0  # k: a candidate is judged with so many variations of it
    variation: tuple[Strength, Strength] = (0.3, 0.05)  # how far, in the first and in the last round
    steps: Positive = 18  # of the solver, for `denoiser`
    guidance: Annotated[float, Field(ge=0)] = 0.0  # of the same

    def reads(self, name: str) -> bool:
        chosen = {"denoiser": self.generator, "classifier": self.feature}
        return name not in chosen or name == chosen[name]


class Adversarial(Descent):
    """A discriminator by DP-SGD, and the generator that it teaches at no cost (DP-GAN)."""

    noise: Noise = "5%"
    steps: Positive = 300
    batch: Positive = 500
    learning_rate: PositiveFloat = 2e-3  # of the discriminator
    max_grad_norm: PositiveFloat = 1.0
    draws: Positive = 1
    noise_levels: NoiseLevels = LogNormal(mean=-2.0, std=0.5)  # of the noise on all that the discriminator sees
    discriminator: Positive = 16  # channels of its first layer
    latent: Positive = 32
    width: Positive = 16  # of the generator
    generator_rate: PositiveFloat = 2e-3  # learning rate of the generator
    every: Positive = 1  # steps of the discriminator for one of the generator
    fakes: Positive = 200  # generated images of a step
    images: Positive = 10_000  # drawn at the end
