"""Settings of the free stages that train networks, or select public images."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sfumato.errors import ConfigError
from sfumato.settings.fields import (
    LearningRate,
    Positive,
    Scale,
    Settings,
    Share,
    Size,
    Strict,
    both_sides,
    is_positive,
)
from sfumato.settings.stages import STAGES


class Classifier(Settings):
    """A classifier trained on the public set only."""

    validation: ClassVar[float] = 0.1  # Share of the public images on which accuracy is measured
    batch: ClassVar[int] = 128  # Images per step

    # Architecture: `residual` is a ResNet. `whitened` begins with a layer that whitens patches,
    # followed by unpadded convolutions, and trains faster
    network: Literal["residual", "whitened"] = "residual"
    width: Positive = 32  # Channels of the first layer; later layers have more
    steps: Positive = 1500  # Gradient steps
    # Peak learning rate of a one-cycle schedule; 0.1 suits the whitened network
    learning_rate: LearningRate = 0.01


class Select(Settings):
    """Selection of public images, for the warm-up or for the release.

    Selection by votes keeps all images of the public classes with the most votes (RPGen stage 1,
    PrivImage). Selection by the teacher keeps, for each sensitive class, the images to which the
    teacher gives this label with the most confidence.
    """

    chooser: ClassVar[str] = "by"
    # Criterion: `votes` (released by the stage `histogram`) or `teacher` (the teacher's labels)
    by: Literal["votes", "teacher"] = "votes"
    # Share of the public classes to keep, for `by: votes`. At least one class is kept. With
    # `histogram.per_class`, the default keeps at least one for each sensitive class, and a share
    # that keeps fewer is refused. 1 keeps all classes, and then no histogram is needed
    ratio: Share = 0.05
    # Total number of images to keep, for `by: teacher`. It is divided equally among the sensitive
    # classes. If there are fewer public images, the default keeps all of them
    images: Positive = 20_000

    def reads(self, name: str) -> bool:
        return name == "public" or name == {"votes": "histogram", "teacher": "teacher"}[self.by]


class Fit(Settings):
    """Fit of a generator to noisy releases."""

    steps: Positive = 600  # Gradient steps of Adam
    batch: Annotated[int, Field(ge=2)] = 200  # Generated images per step
    learning_rate: LearningRate = 8e-3  # Initial learning rate; it falls to zero along a cosine
    images: Positive = 20_000  # Number N_f of images drawn from the fitted generator


class Auxiliary(Fit):
    """A one-step generator fitted to a noisy release, and images drawn from it (FETA-Pro §3.3)."""

    latent: Positive = 32  # Latent dimension: number of random inputs of the generator per image
    # Feature channels of the generator, at half the resolution of the coarse image that it draws
    # first. The coarse image has at most 1024 pixels, such as 32×32. Larger images are made from it
    width: Positive = 40
    # Release to which the generator is fitted; `covariance` fits Gaussians instead of a network
    target: Literal["frequency", "moments", "covariance"] = "frequency"
    # Add fine detail of public images to the images drawn from the Gaussians; requires
    # `target: covariance`
    details: bool = False

    def reads(self, name: str) -> bool:
        if name == "public":
            return self.details
        return name not in ("frequency", "moments", "covariance") or name == self.target

    @model_validator(mode="after")
    def details_of_gaussians(self) -> Self:
        if self.details and self.target != "covariance":
            raise ValueError(
                f"auxiliary.details requires the target covariance, but auxiliary.target is "
                f"{self.target}: set details: false"
            )
        return self


class Student(Settings):
    """A classifier trained on images and labels that `sfumato.stream` draws with the release's
    networks. With `synthesize.relabel`, the labels are the teacher's probabilities.
    """

    batch: ClassVar[int] = 128  # Images per step
    learning_rate: ClassVar[float] = 0.01  # Peak learning rate of a one-cycle schedule

    steps: Positive = 1500  # Gradient steps
    width: Positive = 32  # Channels of the first layer; later layers have more


class Refine(Fit):
    """Further fit of the generator. It is fitted to the releases of `frequency` and `embedding`,
    and to the labels that the teacher gives to the generator's images.
    """

    learning_rate: ClassVar[float] = 4e-3  # type: ignore[misc]  # constant here

    steps: Positive = 300  # Gradient steps of Adam


class Architecture(Strict):
    """Architecture of the class-conditional U-Net."""

    width: Positive = 32  # Base channels, a multiple of 4
    # Channels of each level, in multiples of `width`
    multipliers: Annotated[tuple[Positive, ...], Field(min_length=1)] = (2, 2)
    attention: tuple[int, ...] = (1,)  # Levels with self-attention; 0 is the finest
    blocks: Positive = 1  # Residual blocks per level
    # Factor of the pixel-unshuffle stem: the network trains at resolution / unshuffle
    unshuffle: Literal[1, 2, 4] = 1

    def check_sizes(self, resolution: Size) -> None:
        """Raise ConfigError if no network of this architecture can be built for images of this
        size.
        """
        levels = len(self.multipliers)
        if any(side % self.unshuffle for side in both_sides(resolution)):
            raise ConfigError(
                f"model.unshuffle={self.unshuffle} does not divide the resolution {resolution}: "
                "use 1"
            )
        if self.width % 4:
            raise ConfigError(f"model.width={self.width}: expected a multiple of 4")
        if not set(self.attention) <= set(range(levels)):
            raise ConfigError(
                f"model.attention={self.attention}: expected levels from 0 to {levels - 1}"
            )
        if self.blocks * levels > 1000:
            raise ConfigError(
                f"model.blocks={self.blocks}: expected at most {1000 // levels} blocks per level, "
                f"because the network may have at most 1000 blocks in total (levels: {levels})"
            )
        for level in self.attention:
            attention_heads(self.width * self.multipliers[level])


def attention_heads(channels: int) -> int:
    """Return the number of attention heads. Raises ConfigError if it does not divide `channels`."""
    heads = max(1, channels // 32)
    if channels % heads:
        raise ConfigError(
            f"{channels} channels cannot be divided among {heads} attention heads: choose a "
            "multiple of 32 for model.width"
        )
    return heads


class Model(Architecture):
    """The class-conditional U-Net, or a public text-to-image model.

    Setting `directory` selects a public model; the keys from `width` to `unshuffle` then have no
    effect.
    """

    label_dropout: ClassVar[float] = 0.1  # Share of images shown without label in training

    # Latent diffusion model in the diffusers layout: a folder, or hub:owner/name[@revision]; None:
    # the built-in network
    directory: str | None = None
    # Expected sha256 of the model in `directory`, as `stage pretrain` prints it; None: not checked
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    # Side in pixels to which images are resized before they are encoded; None: the model's own size
    image_size: Positive | None = None
    # Template of the text prompts, one prompt per class. It contains {class}, {article} or
    # {number}; None: a template that depends on data.dataset_id
    prompt: str | None = None
    # Complete text prompts by class name, to be used instead of the template
    prompts: dict[str, str] = Field(default={})
    # Owner's confirmation that the model was not made from sensitive images. Not needed for a model
    # from a release: the privacy.json beside the model lists its charges
    declared_public: bool = False

    def non_default(self) -> dict[str, object]:
        """Return the settings of the chosen network that differ from their defaults, for plans."""
        fields = PUBLIC_MODEL if self.directory else Architecture.model_fields
        return self.model_dump(mode="json", exclude_defaults=True, include={*fields})


PUBLIC_MODEL = ("directory", "sha256", "image_size", "prompt", "prompts")  # keys of a public model


class Amp(Strict):
    """Adversarial model perturbation (RPGen stage 2): compute each gradient at the nearby weights
    with the highest loss.

    With radius 0, it is off.
    """

    rate: ClassVar[float] = 0.4  # Rate η₁ of the ascent
    steps: ClassVar[int] = 1  # Steps of the ascent

    # Largest L2 norm γ of the perturbation, over all weights together
    radius: Annotated[float, Field(ge=0, le=1e5)] = 0.2


# Releases and sets of images on which the warm-up can train
if TYPE_CHECKING:
    TrainingSource = str
else:
    TrainingSource = Literal[
        "central", *(name for name in STAGES["pretrain"].upstream if STAGES[name].gives), "public"
    ]


class Phase(Strict):
    """One phase of the warm-up: denoising training on released or public images."""

    # Sources of the training images, each with its sampling weight
    sources: Annotated[dict[TrainingSource, Scale], Field(min_length=1)]
    # Gradient steps of Adam. If they are missing, the phase gets a share of `pretrain.steps`, in
    # proportion to its `part` (default: 1)
    steps: Positive
    batch: Positive = 64  # Images per step
    learning_rate: LearningRate = 3e-4  # Learning rate of Adam
    augment: Annotated[int, Field(ge=0, le=14)] = 0  # RandAugment operations per image
    # Adversarial model perturbation; `true`: with the settings in `pretrain.amp`; None: off
    amp: Amp | None = None


class Pretrain(Settings):
    """The curriculum: phases of training before DP-SGD.

    Phases without steps of their own divide `steps` in proportion to their `part` (default: 1). The
    batch size and the learning rate apply to every phase that does not set its own.
    """

    chooser: ClassVar[str] = "phases"
    phases: tuple[Phase, ...] = ()  # Phases, in order
    # Gradient steps of all phases that do not set `steps`, together
    steps: Positive = 2000
    batch: Positive = 64  # Images per step
    learning_rate: LearningRate = 3e-4  # Learning rate of Adam
    amp: Amp = Amp()  # Adversarial model perturbation, for phases with `amp: true`

    @model_validator(mode="before")
    @classmethod
    def fill_phases(cls, values: object) -> object:
        """Give each phase its steps, batch and learning rate, so that the resolved plan is
        complete.
        """
        if not isinstance(values, dict):
            return values
        phases = values.get("phases")
        if not isinstance(phases, (list, tuple)) or not all(
            isinstance(phase, dict) for phase in phases
        ):
            return values
        common = {
            key: values.get(key, cls.model_fields[key].default)
            for key in ("steps", "batch", "learning_rate")
        }
        parts = [("part", phase.get("part", 1)) for phase in phases]
        for name, number in [("pretrain.steps", common["steps"]), *parts]:
            if not is_positive(number):
                raise ValueError(f"{name}={number!r}: expected a positive number")
        total = sum(phase.get("part", 1) for phase in phases if "steps" not in phase)
        filled = []
        for phase in phases:
            steps = max(1, round(common["steps"] * phase.get("part", 1) / (total or 1)))
            phase = {
                **common,
                "steps": steps,
                **{key: value for key, value in phase.items() if key != "part"},
            }
            if phase.get("amp") is True:
                phase["amp"] = values.get("amp", {})
            elif phase.get("amp") is False:
                phase["amp"] = None
            filled.append(phase)
        return {**values, "phases": filled}

    def reads(self, name: str) -> bool:
        """Return whether a phase uses images of this input.

        If a phase uses public images, both `public` and `select` are read.
        """
        return any({"select": "public"}.get(name, name) in phase.sources for phase in self.phases)
