"""Settings of Private Evolution and DP-GAN."""

from typing import ClassVar

from sfumato.settings.fields import Norm, Positive, machine
from sfumato.settings.noise import Noise, QuerySettings
from sfumato.settings.noise_levels import LogNormal


class Evolve(QuerySettings):
    """Private Evolution: images vote for the nearest candidates of a public renderer."""

    releases: ClassVar[str] = "rounds"
    generator: ClassVar[str] = "glyphs"  # Name of the renderer that draws the candidates
    feature: ClassVar[str] = "pixels"  # Feature space in which the nearest candidate is found
    # Maximum number of principal directions to which the features are reduced. The directions are
    # not rescaled
    dimension: ClassVar[int] = 256
    # Votes for a candidate count only if their number is above this many standard deviations of
    # the noise
    threshold: ClassVar[float] = 1.0
    # Standard deviation of the noise added to a candidate's genes, in the first and the last round
    variation: ClassVar[tuple[float, float]] = (0.3, 0.05)
    noise: Noise = 20.0
    rounds: Positive = 10  # Number T of rounds; each is one release
    population: Positive = 620  # Number of candidates for all classes together
    # Number of images in the last generation. The release draws from them
    images: Positive = 10_000


class Adversarial(QuerySettings):
    """A discriminator trained by DP-SGD, and a generator that learns from it at no further cost
    (DP-GAN).
    """

    releases: ClassVar[str] = "steps"
    draws: ClassVar[int] = 1  # Number of noise levels per image
    # Noise added to every image before the discriminator reads the image
    noise_levels: ClassVar[LogNormal] = LogNormal(mean=-2.0, std=0.5)
    label_dropout: ClassVar[float] = 0.0  # Share of images shown to the discriminator without label
    learning_rate: ClassVar[float] = 2e-3  # Learning rate of the discriminator
    generator_rate: ClassVar[float] = 2e-3  # Learning rate of the generator
    # Betas of both Adam optimisers: low, so that each network adapts quickly to the other
    betas: ClassVar[tuple[float, float]] = (0.5, 0.99)
    fakes: ClassVar[int] = 200  # Generated images per step
    latent: ClassVar[int] = 32  # Number of random numbers per generated image
    width: ClassVar[int] = 16  # Channels of the generator at half resolution
    discriminator: ClassVar[int] = 16  # Channels of the discriminator's first layer
    images: ClassVar[int] = 10_000  # Images drawn at the end, for inspection only
    noise: Noise = "5%"
    steps: Positive = 300  # Training steps of both networks; each step is one release
    batch: Positive = 500  # Expected images per step: sample_rate = batch / size_hint
    max_grad_norm: Norm = 1.0  # L2 clip C of one image's gradient
    # Number of images whose gradients are computed at once; None: as many as fit into memory
    microbatch_size: Positive | None = machine(None)
    checkpoint_every: Positive = machine(10)  # Training steps from one checkpoint to the next
