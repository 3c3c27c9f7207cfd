"""Typed parameters of every stage: what `params.yaml` and the recipes may say, with defaults and their source.

Every model is frozen and refuses unknown keys. `Params` is the whole; `sfumato.plan` resolves it into one file per stage.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from sfumato.errors import ConfigError

REST = "rest"


def parse_noise(value: object) -> object:
    """The three ways to ask for noise: a multiplier (5.0), a share of the RDP budget ("3%"), or "rest"."""
    if isinstance(value, str) and value != REST:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value)
        if not match or not 0 < float(match[1]) < 100:
            raise ValueError(f"{value!r} is no noise: give a multiplier such as 5.0, a share such as '3%', or 'rest'")
        return f"{float(match[1]):g}%"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not 0 < value < float("inf"):
        raise ValueError(f"a noise multiplier must be positive and finite, not {value}")
    return value


Noise = Annotated[float | str, BeforeValidator(parse_noise)]
Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Data(Strict):
    """Where the sensitive images come from. Everything here is public."""

    dataset_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None  # None: as the source is called
    source: Literal["digits", "fashion-mnist", "mnist", "cifar10", "imagefolder", "npz"] = "digits"
    path: str | None = None
    size: Positive | None = None  # height and width after resizing; None: as the source has them
    channels: Literal[1, 3] | None = None  # None: as the source has them
    holdout_fraction: Fraction = 0.2  # ignored where the source has an official test split


    @property
    def name(self) -> str:
        """The id that the odometer counts by. An image folder or an archive must be given one."""
        if self.dataset_id is None and self.source in ("imagefolder", "npz"):
            raise ConfigError(f"data.dataset_id is missing: name the images of this {self.source} once and for ever, such as clinic-2026")
        return self.dataset_id or self.source


class Privacy(Strict):
    epsilon: PositiveFloat = 10.0
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None  # None: 1 / (size_hint · ln size_hint)
    size_hint: Annotated[int, Field(ge=3)] | None = None  # a public, rounded idea of N: fixes q, T, σ and δ; must be given
    declared_size: bool = False  # N is exactly size_hint and public: records then say zero-out-one
    accountant: Literal["rdp", "pld"] = "rdp"
    spend_again: bool = False
    lifetime_epsilon: PositiveFloat | None = None

    @property
    def size(self) -> int:
        """`size_hint`, which must be known by now."""
        if self.size_hint is None:
            raise ConfigError("privacy.size_hint is missing: give a public, rounded idea of how many sensitive images there are, such as 50000")
        return self.size_hint


class Count(Strict):
    """One noisy release of the class counts (METHODS §2)."""

    enabled: bool = True
    noise: Noise = 50.0


class Central(Strict):
    """Noisy central images per class (DP-FETA §3.1)."""

    enabled: bool = True
    noise: Noise = 5.0
    statistic: Literal["mean", "mode"] = "mean"
    repeats: Positive = 5  # central images per class
    batch: Positive = 6000  # expected images per release: sample_rate = batch / size_hint
    max_norm: PositiveFloat | None = None  # L2 clip of an image after pooling; None: the largest it can have, √d'
    pool: Literal[1, 2, 4] = 1  # average pooling before the clip
    bins: Annotated[int, Field(ge=2, le=256)] = 2  # mode only: 2 for grey, 16 for colour


class FeatureMap(Strict):
    """One public map of an image, whose random Fourier features are released."""

    map: Literal["pixels", "scattering"] = "pixels"
    length_scales: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = (0.366, 0.183)  # in units of √d: ℓ = 10.25 at 28×28
    weight: PositiveFloat = 1.0  # share of the squared norm, relative to the other maps


class Frequency(Strict):
    """Noisy joint random-Fourier embedding of images and labels (FETA-Pro Algorithm 1, DP-MERF)."""

    enabled: bool = True
    noise: Noise = 7.4
    size: Annotated[int, Field(ge=2, multiple_of=2)] = 10_000  # K
    features: Annotated[tuple[FeatureMap, ...], Field(min_length=1)] = (FeatureMap(),)


class Auxiliary(Strict):
    """One-step generator fitted to the frequency release, and the images it draws (FETA-Pro §3.3)."""

    enabled: bool = True
    latent: Positive = 60
    width: Positive = 32
    steps: Positive = 600
    batch: Positive = 250
    learning_rate: PositiveFloat = 0.01
    decay: Annotated[float, Field(gt=0, le=1)] = 0.7  # learning-rate factor, applied ten times over the run
    labels: Literal["uniform", "prior"] = "uniform"
    images: Positive = 20_000  # N_f


class Model(Strict):
    """The class-conditional U-Net (reference sizes: METHODS §8)."""

    width: Positive = 32
    multipliers: Annotated[tuple[Positive, ...], Field(min_length=1)] = (2, 2)
    attention: tuple[int, ...] = (1,)  # levels (0 is the finest) that get self-attention
    blocks: Positive = 1  # residual blocks per level
    unshuffle: Literal[1, 2, 4] = 1  # pixel-unshuffle stem: train at resolution / unshuffle
    sigma_data: PositiveFloat = 0.5
    label_dropout: Fraction = 0.1


class LogNormal(Strict):
    """ln σ ~ N(mean, std²) (EDM)."""

    law: Literal["log-normal"] = "log-normal"
    mean: float = -1.2
    std: PositiveFloat = 1.2


class TimestepMixture(Strict):
    """t from Σ wᵢ U{lᵢ..uᵢ} over T = 1000 linear steps, mapped to σ (DP-Diffusion §3.3)."""

    law: Literal["timesteps"] = "timesteps"
    weights: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = (0.05, 0.9, 0.05)
    bounds: Annotated[tuple[int, ...], Field(min_length=2)] = (0, 200, 800, 1000)

    @model_validator(mode="after")
    def one_more_bound_than_weights(self) -> TimestepMixture:
        rising = all(a < b for a, b in zip(self.bounds, self.bounds[1:], strict=False))
        if len(self.bounds) != len(self.weights) + 1 or not rising or self.bounds[0] < 0 or self.bounds[-1] > 1000:
            raise ValueError("bounds must rise within 0..1000 and be one more than weights")
        return self


NoiseLevels = Annotated[LogNormal | TimestepMixture, Field(discriminator="law")]


class Phase(Strict):
    """One phase of the warm-up: plain denoising training on released or public images."""

    sources: Annotated[dict[Literal["central", "auxiliary"], PositiveFloat], Field(min_length=1)]  # name -> weight
    steps: Positive
    batch: Positive = 64
    learning_rate: PositiveFloat = 3e-4
    augment: Annotated[int, Field(ge=0, le=14)] = 0  # RandAugment operations per image


class Pretrain(Strict):
    """The curriculum: phases in order. `part` of a phase is its part of `steps`; batch and learning rate are those of all unless its own."""

    enabled: bool = True
    phases: tuple[Phase, ...] = ()
    steps: Positive = 2000  # of all phases together
    batch: Positive = 64
    learning_rate: PositiveFloat = 3e-4
    median: Annotated[int, Field(ge=0)] = 3  # median blur of central images (0: none)
    ema: Fraction = 0.999
    noise_levels: NoiseLevels = LogNormal()

    @model_validator(mode="before")
    @classmethod
    def fill_phases(cls, values: Any) -> Any:
        """Give each phase its steps, batch and learning rate, so that what is resolved says all."""
        phases = values.get("phases") if isinstance(values, dict) else None
        if not isinstance(phases, (list, tuple)) or not all(isinstance(phase, dict) for phase in phases):
            return values
        whole = sum(phase.get("part", 1) for phase in phases if "steps" not in phase)
        filled = []
        for phase in phases:
            phase = {"batch": values.get("batch", 64), "learning_rate": values.get("learning_rate", 3e-4), **phase}
            part = phase.pop("part", 1)
            phase.setdefault("steps", max(1, round(values.get("steps", 2000) * part / whole)) if whole else 1)
            filled.append(phase)
        return {**values, "phases": filled}


class Finetune(Strict):
    """DP-SGD (METHODS §8)."""

    enabled: bool = True
    noise: Noise = REST
    steps: Positive = 2100
    batch: Positive = 4096  # expected images per step: sample_rate = batch / size_hint
    learning_rate: PositiveFloat = 3e-4
    max_grad_norm: PositiveFloat = 1e-3
    draws: Positive = 32  # K, averaged before the clip
    noise_levels: NoiseLevels = LogNormal()
    flip: bool = False
    crop: Annotated[int, Field(ge=0)] = 0  # random shift by up to so many pixels
    ema: Fraction = 0.999
    chunk: Positive | None = None  # images per vmap chunk; None: chosen from the model's size
    checkpoint_every: Positive = 10


Drawable = Literal["finetune", "pretrain", "auxiliary"]  # the stages whose models draw images


class Synthesize(Strict):
    """What is released: images drawn from a weighted mixture of the models at hand."""

    count: Positive = 10_000
    sources: Annotated[dict[Drawable, PositiveFloat], Field(min_length=1)] = {"finetune": 1.0}
    steps: Positive = 18  # Heun steps
    guidance: Annotated[float, Field(ge=0)] = 0.0  # 0: none; g: D + g·(D − D_unconditional)
    labels: Literal["prior", "uniform"] = "prior"
    png: bool = False


class Evaluate(Strict):
    enabled: bool = True
    classifiers: Annotated[tuple[Literal["lr", "mlp", "cnn"], ...], Field(min_length=1)] = ("lr", "mlp", "cnn")
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0, 1, 2)
    stages: tuple[Drawable, ...] = ()  # also score these models, each alone
    images: Positive = 10_000  # drawn per model scored alone
    epochs: Positive = 12
    bound: bool = True  # also train on real images: the upper bound


class Params(Strict):
    """All of `params.yaml`, after the recipe and the defaults have filled it in."""

    recipe: str = "feta-pro"
    profile: str | None = "digits"  # the scale of data and compute: pipelines/profiles/<profile>.yaml
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    data: Data = Data()
    privacy: Privacy = Privacy()
    model: Model = Model()
    count: Count = Count()
    central: Central = Central()
    frequency: Frequency = Frequency()
    auxiliary: Auxiliary = Auxiliary()
    pretrain: Pretrain = Pretrain()
    finetune: Finetune = Finetune()
    synthesize: Synthesize = Synthesize()
    evaluate: Evaluate = Evaluate()
