"""Settings of DP-SGD, and of the query that chooses the weights to train."""

from typing import ClassVar, Literal, Protocol

from sfumato.settings.fields import REST, Draws, LearningRate, Norm, Positive, machine
from sfumato.settings.noise import Noise, QuerySettings
from sfumato.settings.noise_levels import LogNormal, NoiseLevels
from sfumato.settings.training import Model


class Saliency(QuerySettings):
    """Noisy gradient norms of attention matrices (DP-SAPF §3.2); `finetune` trains the matrices
    with the largest norms.
    """

    draws: ClassVar[int] = 1  # Number of noise levels per image
    # Probability that an image's label is hidden, independently at each of its noise levels
    label_dropout: ClassVar[float] = Model.label_dropout
    noise: Noise = "2%"
    # L2 clip C_s of one image's gradient, over all query, key and value matrices together
    max_norm: Norm = 1.0
    noise_levels: NoiseLevels = LogNormal()  # Distribution of the noise levels
    # Number of images whose gradients are computed at once; None: as many as fit into memory
    microbatch_size: Positive | None = machine(None)


class StepSettings(Protocol):
    """Settings of a stage that trains a network by DP-SGD, such as `Finetune`."""

    @property
    def draws(self) -> int: ...
    @property
    def label_dropout(self) -> float: ...
    @property
    def noise_levels(self) -> NoiseLevels: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def max_grad_norm(self) -> float: ...
    @property
    def microbatch_size(self) -> int | None: ...


SALIENT = ("salient", "salient-lora")  # values of `trainable` that need the saliency query


class Finetune(QuerySettings):
    """DP-SGD on the diffusion model."""

    chooser: ClassVar[str] = "trainable"
    releases: ClassVar[str] = "steps"
    # Share c of candidate matrices to train, for salient and salient-lora
    ratio: ClassVar[float] = 0.3
    rank: ClassVar[int] = 4  # Rank r of the adapters
    # Probability that an image's label is hidden, independently at each of its noise levels
    label_dropout: ClassVar[float] = Model.label_dropout
    noise: Noise = REST
    steps: Positive = 2100  # Training steps; each is one release
    batch: Positive = 4096  # Expected images per step: sample_rate = batch / size_hint
    learning_rate: LearningRate = 3e-4  # Learning rate of Adam
    max_grad_norm: Norm = 1e-3  # L2 clip C of one image's gradient
    # Number K of noise levels per image. The gradients at these levels are averaged, then clipped
    draws: Draws = 32
    noise_levels: NoiseLevels = LogNormal()  # Distribution of the noise levels
    # Number of images whose gradients are computed at once; None: as many as fit into memory
    microbatch_size: Positive | None = machine(None)
    checkpoint_every: Positive = machine(10)  # Training steps from one checkpoint to the next
    # Weights to train. The stage `saliency` finds the salient ones
    trainable: Literal["all", "attention", "attention-lora", "salient", "salient-lora"] = "all"

    def reads(self, name: str) -> bool:
        return name != "saliency" or self.trainable in SALIENT
