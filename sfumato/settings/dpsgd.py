"""Settings of DP-SGD, and of the query that chooses what it trains."""

from typing import ClassVar, Literal

from sfumato.settings.fields import REST, Draws, LearningRate, Norm, Positive, machine
from sfumato.settings.noise import Noise, QuerySettings
from sfumato.settings.noise_levels import LogNormal, NoiseLevels


class Saliency(QuerySettings):
    """Noisy gradient norms of attention matrices (DP-SAPF §3.2). `finetune` decides, at no cost, which are trained."""

    draws: ClassVar[int] = 1  # noise levels per image
    noise: Noise = "2%"
    max_norm: Norm = 1.0  # C_s, the L2 clip of one image's gradient over all candidates
    noise_levels: NoiseLevels = LogNormal()  # the law of the noise levels
    microbatch_size: Positive | None = machine(None)  # images whose gradients are taken together; None: what fits


SALIENT = ("salient", "salient-lora")  # the sets that the saliency query chooses


class Finetune(QuerySettings):
    """DP-SGD on the diffusion model."""

    chooser: ClassVar[str] = "trainable"
    releases: ClassVar[str] = "steps"
    ratio: ClassVar[float] = 0.3  # c: part of the candidate matrices, for the sets that choose some
    rank: ClassVar[int] = 4  # r, of the adapters, for the sets with adapters
    noise: Noise = REST
    steps: Positive = 2100
    batch: Positive = 4096  # expected images per step: sample_rate = batch / size_hint
    learning_rate: LearningRate = 3e-4  # of Adam
    max_grad_norm: Norm = 1e-3  # C, the L2 clip of one image's gradient
    draws: Draws = 32  # K, noise levels per image, averaged before the clip
    noise_levels: NoiseLevels = LogNormal()  # the law of the noise levels
    microbatch_size: Positive | None = machine(None)  # images whose gradients are taken together; None: what fits
    checkpoint_every: Positive = machine(10)  # steps
    # which weights are trained; `saliency` chooses the salient ones
    trainable: Literal["all", "attention", "attention-lora", "salient", "salient-lora"] = "all"

    def reads(self, name: str) -> bool:
        return name != "saliency" or self.trainable in SALIENT
