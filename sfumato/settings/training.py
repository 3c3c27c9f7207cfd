"""Settings of the free stages that train networks, generators and the diffusion model."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sfumato.settings.baselines import Warming
from sfumato.settings.fields import LearningRate, Positive, Scale, Settings, Share, Strict, is_positive


class Classifier(Settings):
    """A network trained to classify the public set, and on nothing else."""

    validation: ClassVar[float] = 0.1  # part of the public images on which its accuracy is measured
    batch: ClassVar[int] = 128  # images in a step

    # a ResNet, or a network of unpadded convolutions whose first layer whitens patches, which trains faster
    network: Literal["residual", "whitened"] = "residual"
    width: Positive = 32  # channels of the first layer; later ones have more
    steps: Positive = 1500  # gradient steps
    learning_rate: LearningRate = 0.01  # peak of a one-cycle schedule; 0.1 suits the whitened network


class Select(Settings):
    """Selection of public images, for the warm-up or for the release.

    By votes: all images of the classes with the most votes (RPGen stage 1, PrivImage). By the teacher: of each
    sensitive class, the images that the teacher is surest of.
    """

    chooser: ClassVar[str] = "by"
    by: Literal["votes", "teacher"] = "votes"  # votes of `histogram` for public classes, or labels of `teacher`
    ratio: Share = 0.05  # by votes: share of the public classes to keep, one class at least; 1 needs no histogram
    images: Positive = 20_000  # by the teacher: images of all classes together, equally many of each

    def reads(self, name: str) -> bool:
        return name == "public" or name == {"votes": "histogram", "teacher": "teacher"}[self.by]


class Fit(Settings):
    """How a generator is fitted to noisy releases."""

    steps: Positive = 600  # gradient steps of Adam
    batch: Positive = 200  # drawn images in a step
    learning_rate: LearningRate = 8e-3  # falls to zero by a cosine
    images: Positive = 20_000  # images drawn from the fitted generator, N_f


class Auxiliary(Fit):
    """One-step generator fitted to the frequency release, and the images it draws (FETA-Pro §3.3)."""

    latent: Positive = 32  # random numbers of an image
    width: Positive = 40  # channels at half resolution
    # the release that its images match; covariance fits Gaussians instead of a network
    target: Literal["frequency", "moments", "covariance"] = "frequency"
    details: bool = False  # take detail finer than the Gaussians' from the public images

    def reads(self, name: str) -> bool:
        if name == "public":
            return self.details
        return name not in ("frequency", "moments", "covariance") or name == self.target

    @model_validator(mode="after")
    def details_of_gaussians(self) -> Self:
        if self.details and self.target != "covariance":
            raise ValueError(f"details go with target: covariance, not with target: {self.target}: leave them out")
        return self


class Refine(Fit):
    """The generator fitted further: to both releases, and to what the teacher sees in its images."""

    learning_rate: ClassVar[float] = 4e-3  # type: ignore[misc]  # a constant here

    steps: Positive = 300  # gradient steps of Adam


class Model(Strict):
    """The class-conditional U-Net, or a public text-to-image model.

    `directory` selects a public model; `width` to `unshuffle` then have no effect.
    """

    label_dropout: ClassVar[float] = 0.1  # share of images shown without label in training

    width: Positive = 32  # base channels, a multiple of 4
    multipliers: Annotated[tuple[Positive, ...], Field(min_length=1)] = (2, 2)  # channels of each level, times width
    attention: tuple[int, ...] = (1,)  # levels with self-attention; 0 is the finest
    blocks: Positive = 1  # residual blocks per level
    unshuffle: Literal[1, 2, 4] = 1  # pixel-unshuffle stem: train at resolution / unshuffle
    # a latent diffusion model in the layout of diffusers: a folder, or hub:owner/name[@revision]; None: our own network
    directory: str | None = None
    # expected sha256 of that model, as `stage pretrain` prints it; None: not checked
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    # side that images are resized to before they are encoded; None: the model's own
    image_size: Positive | None = None
    # template of the class prompts, with {class}, {article} or {number}; None: by data.dataset_id
    prompt: str | None = None
    prompts: dict[str, str] = Field(default={})  # class name -> its whole prompt, instead of the template
    # owner's confirmation: a model without privacy.json was not made from sensitive images
    declared_public: bool = False

    def network(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"declared_public", *PUBLIC_MODEL})

    def non_default(self) -> dict[str, Any]:
        """What a plan holds: the keys of the network in use that differ from their defaults."""
        used = PUBLIC_MODEL if self.directory else self.network()
        return self.model_dump(mode="json", exclude_defaults=True, include={*used})


PUBLIC_MODEL = ("directory", "sha256", "image_size", "prompt", "prompts")  # the keys of a public model


class Amp(Strict):
    """Adversarial model perturbation (RPGen stage 2): descend at the worst weights nearby. Radius 0: plain training."""

    rate: ClassVar[float] = 0.4  # η₁, of the ascent
    steps: ClassVar[int] = 1  # of the ascent

    radius: Annotated[float, Field(ge=0, le=1e5)] = 0.2  # γ


class Phase(Strict):
    """One phase of the warm-up: denoising training on released or public images."""

    # stage whose images are drawn -> weight
    sources: Annotated[dict[Literal["central", "auxiliary", "refine", Warming, "public"], Scale], Field(min_length=1)]
    steps: Positive  # of Adam; a recipe gives `part` instead, its part of those of all phases
    batch: Positive = 64  # images per step
    learning_rate: LearningRate = 3e-4  # of Adam
    augment: Annotated[int, Field(ge=0, le=14)] = 0  # RandAugment operations per image
    amp: Amp | None = None  # `amp: true` in a recipe stands for that of all phases


class Pretrain(Settings):
    """The curriculum: phases in order. `part` of a phase is its part of `steps`.

    A phase has the batch and the learning rate of all, unless it names its own.
    """

    chooser: ClassVar[str] = "phases"
    phases: tuple[Phase, ...] = ()  # the phases in order
    steps: Positive = 2000  # of all phases together
    batch: Positive = 64  # images per step
    learning_rate: LearningRate = 3e-4  # of Adam
    amp: Amp = Amp()  # of the phases that ask for it

    @model_validator(mode="before")
    @classmethod
    def fill_phases(cls, values: Any) -> Any:
        """Give each phase its steps, batch and learning rate, so that the resolved plan is complete."""
        phases = values.get("phases") if isinstance(values, dict) else None
        if not isinstance(phases, (list, tuple)) or not all(isinstance(phase, dict) for phase in phases):
            return values
        common = {key: values.get(key, cls.model_fields[key].default) for key in ("steps", "batch", "learning_rate")}
        parts = [("part", phase.get("part", 1)) for phase in phases]
        for name, number in [("pretrain.steps", common["steps"]), *parts]:
            if not is_positive(number):
                raise ValueError(f"{name}={number!r}: expected a positive number")
        whole = sum(phase.get("part", 1) for phase in phases if "steps" not in phase)
        filled = []
        for phase in phases:
            steps = max(1, round(common["steps"] * phase.get("part", 1) / (whole or 1)))
            phase = {**common, "steps": steps, **{key: value for key, value in phase.items() if key != "part"}}
            if phase.get("amp") is True:
                phase["amp"] = values.get("amp", {})
            elif phase.get("amp") is False:
                phase["amp"] = None
            filled.append(phase)
        return {**values, "phases": filled}

    def reads(self, name: str) -> bool:
        """Of a phase that shows public images, the selection too."""
        return any({"select": "public"}.get(name, name) in phase.sources for phase in self.phases)
