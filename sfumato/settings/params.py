"""Typed parameters of every stage: what `params.yaml` and the recipes may say, with defaults and their source.

Every model is frozen and refuses unknown keys. `Params` is the whole; `stage plan` resolves it into a file per stage.
"""

from __future__ import annotations

import math
import os
import re
from typing import Annotated, Any, ClassVar, Literal, Self, TypeGuard, get_args

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from sfumato.errors import ConfigError, nearest
from sfumato.storage.documents import dataset_name

REST = "rest"
UNLIMITED = "unlimited"  # a lifetime budget: for images that are public


def is_positive(value: object) -> TypeGuard[float]:
    """Whether this is a number above 0, and finite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def parse_noise(value: object) -> object:
    """The three ways to ask for noise: a multiplier (5.0), a share of the RDP budget ("3%"), or "rest"."""
    if isinstance(value, str) and value != REST:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value)
        if not match or not 0 < float(match[1]) < 100:
            raise ValueError(
                f"{value!r} is not a noise: give a multiplier such as 5.0, a share such as '3%', or 'rest'"
            )
        return f"{float(match[1]):g}%"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not is_positive(value):
        raise ValueError(f"a noise multiplier must be positive and finite, not {value}")
    return value


def at_epsilon(epsilon: float, table: dict[Any, float]) -> float:
    """A number that depends on ε: linear in ln ε between the entries of `table`, constant beyond them."""
    for key in table:
        if not is_positive(key):
            raise ValueError(f"{key} is not an entry by ε: give a positive number")
    if not table:
        raise ValueError("a table by ε needs an entry, such as 1: 30%")
    known = sorted(table)
    return float(np.interp(math.log(epsilon), np.log(known), [table[key] for key in known]))


def noise_at(epsilon: float, table: dict[Any, Any]) -> str:
    """A share that depends on ε: {1: "30%", 10: "5%"} is a power of ε between its ends. Raises ValueError."""
    logarithms = {}
    for key, value in table.items():
        share = parse_noise(value)
        if not isinstance(share, str) or share == REST:
            raise ValueError(f"{key}: {value} is not an entry by ε: give a positive ε and a share, such as 1: 30%")
        logarithms[key] = math.log(float(share[:-1]))
    return f"{math.exp(at_epsilon(epsilon, logarithms)):.4g}%"


def weights_at(epsilon: float, sources: dict[str, Any]) -> dict[str, Any]:
    """`sources`, where a weight may depend on ε: of {1: 2, 10: 0} nothing is left from ε = 10 on. Raises ValueError."""
    found = {}
    for name, weight in sources.items():
        if isinstance(weight, dict):
            for key, value in weight.items():
                if value != 0 and not is_positive(value):
                    raise ValueError(f"{key}: {value} is not an entry by ε: give a positive ε and a weight from 0 on")
            weight = round(at_epsilon(epsilon, weight), 4)
            if weight == 0:
                continue
        found[name] = weight
    return found


def parse_lifetime(value: object) -> object:
    """A lifetime budget: a positive number, or "unlimited"."""
    if value is not None and value != UNLIMITED and not is_positive(value):
        raise ValueError("expected a positive number, or unlimited where the images are public")
    return value


Lifetime = Annotated[float | str | None, BeforeValidator(parse_lifetime)]
Noise = Annotated[float | str, BeforeValidator(parse_noise)]
Positive = Annotated[int, Field(gt=0, le=10**9)]
DatasetId = Annotated[str, AfterValidator(dataset_name)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


# Machine settings: they change speed alone, so no plan holds them. A stage reads them from its environment.
MACHINE = {"chunk": "SFUMATO_CHUNK", "checkpoint_every": "SFUMATO_CHECKPOINT_EVERY"}


def machine(default: int | None) -> Any:
    """The field of a machine setting: it is not written into a plan."""
    return Field(default=default, exclude=True)


def unwritten(default: str | float | bool) -> Any:
    """A field that no plan holds while it has its default: plans from before it was there stay what they are."""
    return Field(default=default, exclude_if=lambda value: value == default)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Settings(Strict):
    """The parameters of one stage, which `sfumato.settings.stages` lists. A stage runs where `Params.run` names it."""

    chooser: ClassVar[str] = ""  # the key that decides which inputs are read, where one does

    def on_this_machine(self) -> Self:
        """With the machine settings that the environment gives. Raises ConfigError for one that is no number."""
        found = {}
        for key, variable in MACHINE.items():
            if key in type(self).model_fields and (text := os.environ.get(variable)):
                if not text.isdigit() or int(text) < 1:
                    raise ConfigError(f"{variable}={text}: expected a whole number of at least 1")
                found[key] = int(text)
        return self.model_copy(update=found)

    def reads(self, name: str) -> bool:
        """Whether the stage reads its input `name` under these settings."""
        return True


class QuerySettings(Settings):
    """The parameters of a query. `noise` is solved for by the plan; the query never sees it.

    `batch`, where it has one, says how many images are expected in a draw; without it, or where it is None, all are
    drawn.
    """

    releases: ClassVar[str] = ""  # the key that says how many releases there are, where not one alone
    noise: Noise

    def sampling(self, size_hint: int) -> tuple[float, int]:
        """(sample rate, number of releases), by public numbers alone."""
        batch, uses = getattr(self, "batch", None), getattr(self, self.releases) if self.releases else 1
        return 1.0 if batch is None else min(1.0, batch / size_hint), uses


# units of privacy: one image with its label, or all images of one person
IMAGE: Literal["image"] = "image"
GROUP: Literal["group"] = "group"
OF_THE_OWNER = ("imagefolder", "npz")  # sources that hold whatever their owner put there


class Groups(Strict):
    """Where the id of each image's person is found, one way of four. The ids are private: they are never written.

    csv: a file with the columns file (its path below data.path) and group (the id); pattern: a regular expression whose
    one group is the id in a file's name; folder: pictures lie in <class>/<id>/; array: groups.npy in the folder, or
    `groups` in the archive, has an id for each image, in their order.
    """

    csv: str | None = None
    pattern: str | None = None
    folder: bool = False
    array: bool = False
    alone: bool = False  # the owner's word that an image without an id is the only one of its person

    @model_validator(mode="after")
    def one_way(self) -> Groups:
        ways = [name for name in ("csv", "pattern", "folder", "array") if getattr(self, name)]
        if len(ways) != 1:
            raise ValueError(f"it names {len(ways)} ways to find ids: give one of csv, pattern, folder, array")
        return self

    @field_validator("pattern")
    @classmethod
    def finds_one_id(cls, value: str | None) -> str | None:
        try:
            found = 1 if value is None else re.compile(value).groups
        except re.error as error:
            raise ValueError(f"it is no regular expression ({error})") from error
        if found != 1:
            raise ValueError(f"it has {found} groups in parentheses: expected one, around the id, as in '^(P\\d+)_'")
        return value


class Data(Strict):
    """Where the sensitive images come from. Everything here is public."""

    # None: as the source is called
    dataset_id: DatasetId | None = None
    source: str = "digits"  # one of SOURCES (sfumato/data/sources)
    path: str | None = None
    size: Positive | None = None  # height and width after resizing; None: as the source has them
    channels: Literal[1, 3] | None = None  # None: as the source has them
    # a public name of this state of the images: where they change, another one; None: drawn when first prepared
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    holdout_fraction: Fraction = 0.2  # ignored where the source has an official test split
    # said by the owner where images or a folder of another dataset_id come again under this one
    different_people: bool = False
    groups: Groups | None = None  # which images are of one person, for privacy.unit: group
    # said by the owner where images on which something was spent come again in other groups
    other_groups: bool = False

    @model_validator(mode="after")
    def groups_are_of_the_owner(self) -> Data:
        if self.groups is not None and self.source not in OF_THE_OWNER:
            raise ValueError(
                f"data.groups goes with images of your own ({', '.join(OF_THE_OWNER)}), not with source={self.source}"
            )
        return self

    @property
    def name(self) -> str:
        """The id that the odometer counts by. An image folder or an archive must be given one."""
        if self.dataset_id is None and self.source in OF_THE_OWNER:
            raise ConfigError(
                f"data.dataset_id is missing: name the images of this {self.source} once and for ever, "
                "such as clinic-2026"
            )
        return self.dataset_id or self.source


class Privacy(Strict):
    epsilon: PositiveFloat = 10.0
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None  # None: 1 / (size_hint · ln size_hint)
    # what is protected: an image with its label, or all images of one person (data.groups). "image" where it is written
    # is the owner's word that no two images are of one person; None: nobody said
    unit: Literal["image", "group"] | None = None
    group_weight: Literal["mean", "capped"] = "mean"  # all groups count alike, or by their images up to group_cap
    group_cap: Annotated[int, Field(ge=2)] | None = None  # m, public: a group of n images counts min(n, m)/m
    # a public, rounded idea of how many units there are: fixes q, T, σ and δ; must be given
    size_hint: Annotated[int, Field(ge=3)] | None = None
    declared_size: bool = False  # N is exactly size_hint and public: records then say zero-out-one
    accountant: Literal["rdp", "pld"] = "rdp"
    spend_again: tuple[str, ...] = ()  # queries to pay for once more, with those that depend on them
    # of everything ever opened on the dataset; None: `epsilon`. Public images may have "unlimited"
    lifetime_epsilon: Lifetime = None

    @field_validator("spend_again", mode="before")
    @classmethod
    def names_of_queries(cls, value: object) -> object:
        if value is True:
            raise ValueError("it is a list of stages now: name those to pay for once more, such as [count]")
        return () if value is False else value

    @model_validator(mode="after")
    def weight_of_groups(self) -> Privacy:
        if (self.group_weight == "capped") != (self.group_cap is not None):
            raise ValueError("group_weight: capped and group_cap, a public number of images, go together: give both")
        if self.group_cap is not None and self.unit != GROUP:
            raise ValueError("group_weight and group_cap go with unit: group")
        return self

    @property
    def protected(self) -> str:
        """`unit`, filled in."""
        return self.unit or IMAGE

    @property
    def size(self) -> int:
        """`size_hint`, which must be known by now."""
        if self.size_hint is None:
            raise ConfigError(
                "privacy.size_hint is missing: give a public, rounded idea of how many sensitive images there are "
                "(of persons under unit: group), such as 50000"
            )
        return self.size_hint

    @property
    def lifetime(self) -> float | str:
        """`lifetime_epsilon`, filled in."""
        return self.epsilon if self.lifetime_epsilon is None else self.lifetime_epsilon


# as the Deployments Registry has them
Publisher = Literal["Government", "Industry", "Nonprofit"]
Sector = Literal["Technology", "Healthcare", "Education", "Government", "Energy", "Finance"]
Line = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\r\n]+$")]


class Release(Strict):
    """What the release says of itself, in its owner's words: for its cards and statements, and public like them.

    No query depends on it, so it may be changed at any time at no cost.
    """

    owner: Line | None = None  # who publishes the set
    owner_type: Publisher | None = None
    contact: Line | None = None  # an address that answers questions about it
    purpose: Line | None = None  # what it is for
    region: Line | None = None  # that the images describe, or whose laws apply
    sector: Sector | None = None
    licence: Line | None = None  # an SPDX identifier in small letters, as dataset hubs have them, such as cc-by-4.0
    url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None  # the folder where it will be published


class Count(QuerySettings):
    """One noisy release of the class counts (METHODS §2)."""

    noise: Noise = 50.0


class Central(QuerySettings):
    """Noisy central images per class (DP-FETA §3.1)."""

    releases: ClassVar[str] = "repeats"

    noise: Noise = 5.0
    statistic: Literal["mean", "mode"] = "mean"
    repeats: Positive = 5  # central images per class
    batch: Positive = 6000  # expected images per release: sample_rate = batch / size_hint
    max_norm: PositiveFloat | None = None  # L2 clip of an image after pooling; None: the largest it can have, √d'
    pool: Literal[1, 2, 4] = 1  # average pooling before the clip
    bins: Annotated[int, Field(ge=2, le=256)] = 2  # mode only: 2 for grey, 16 for colour


class FeatureMap(Strict):
    """One public map of an image, whose random Fourier features are released."""

    map: str = "pixels"  # one of FEATURES (sfumato/features)
    # of which the features are made: random ones of a kernel, or the map's output itself, or its squares
    kernel: Literal["gaussian", "rational-quadratic", "linear", "squared"] = unwritten("gaussian")
    # in units of √d: ℓ = 10.25 at 28×28
    length_scales: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = (0.366, 0.183)
    weight: PositiveFloat = 1.0  # share of the squared norm, relative to the other maps


class Frequency(QuerySettings):
    """Noisy joint random-Fourier embedding of images and labels (FETA-Pro Algorithm 1, DP-MERF)."""

    noise: Noise = 7.4
    size: Annotated[int, Field(ge=2, multiple_of=2)] = 10_000  # K
    features: Annotated[tuple[FeatureMap, ...], Field(min_length=1)] = (FeatureMap(),)


class Covariance(QuerySettings):
    """Noisy means and covariances, by class, of the low frequencies of the images: of their cosine transform."""

    noise: Noise = 10.0
    # coefficients of brightness, the lowest first, and of each of the two contrasts of a colour image; what is released
    # grows with the square of their number
    frequencies: Annotated[int, Field(gt=0, le=300)] = 64
    contrasts: Annotated[int, Field(gt=0, le=100)] = 16
    bound: PositiveFloat = 0.3  # clip of an image's distance from grey, root mean square of its pixels in [0, 1]
    products: Annotated[float, Field(gt=0, lt=1)] = 0.7  # share of the squared norm that the products have
    flip: bool = False  # an image stands for its mirror image too, as of photographs


class Moments(QuerySettings):
    """Noisy means, by class, of what a public network sees in an image, and of its squares (DP-MEPF)."""

    noise: Noise = 20.0
    # what its last layer sees, or its last cells in their places
    feature: Literal["classifier", "cells"] = "classifier"
    squares: Fraction = 0.5  # share of the squared norm that the squares have; the rest is the features' own


Share = Annotated[float, Field(gt=0, le=1)]
Strength = Annotated[float, Field(gt=0, lt=1)]


class Public(Strict):
    """Labelled public images: free to use, and without any guarantee of their own (METHODS §5)."""

    source: str = "glyphs"  # one of SOURCES (sfumato/data/sources)
    path: str | None = None
    per_class: Positive = 300  # images of each class, for the sources that are drawn: glyphs, procedural, photos
    fonts: Literal["matplotlib", "system"] = "matplotlib"  # glyphs only: which fonts are drawn
    # said by the owner of images that carry no privacy.json: none was made from sensitive images
    declared_public: bool = False


class Classifier(Settings):
    """A network trained to classify the public set, and on nothing else (METHODS §5, §9c)."""

    network: Literal["residual", "whitened"] = "residual"
    width: Positive = 32
    steps: Positive = 1500
    batch: Positive = 128
    learning_rate: PositiveFloat = 0.01  # peak of a one-cycle schedule; 0.1 suits the whitened network
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.1  # part of the public images kept for its accuracy


class Histogram(QuerySettings):
    """How many sensitive images the public classifier puts into each public class, noised (RPGen stage 1, PrivImage).

    votes: classes that an image votes for, the likeliest first: Δ = √votes.
    """

    noise: Noise = 50.0
    votes: Positive = 1
    per_class: bool = False  # one histogram for each sensitive class (PrivImage), not one for all (RPGen)
    batch: Positive | None = None  # expected images: sample_rate = batch / size_hint; None: all images, sample_rate 1


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


# of `Teacher` where nothing else is said: at ε up to 1, and from 10 on; between them by powers of ε (METHODS §9c)
TEACHER: dict[str, dict[str, tuple[float, float]]] = {
    "public": {"dimension": (256, 512), "power": (0.8, 0.5), "steps": (25, 40), "learning_rate": (12.0, 60.0)},
    "auxiliary": {
        "dimension": (1024, 1024),
        "power": (0.5, 0.5),
        "steps": (40, 80),
        "learning_rate": (300.0, 4000.0),
        "last_rate": (0.2, 0.2),
        "momentum": (0.8, 0.8),
        "max_norm": (0.3, 0.1),
        "ridge": (1e-3, 1e-3),
        "average": (1 / 3, 1 / 3),
    },
}


class Teacher(QuerySettings):
    """A linear classifier on public features, by noisy gradient steps over all images (METHODS §12).

    With few steps and a high rate: each step releases as many numbers as the classifier has. What is left out follows
    from `fitted_on` and privacy.epsilon alone, by the table TEACHER; the defaults here are those at ε = 10.
    """

    chooser: ClassVar[str] = "feature"
    releases: ClassVar[str] = "steps"
    noise: Noise = "10%"
    feature: str = "classifier"  # the network that `classifier` trained, or one of FEATURES (sfumato/features)
    fitted_on: Literal["public", "auxiliary"] = "public"  # images whose principal directions span the features
    dimension: Positive = 512  # of the features, at most
    power: Annotated[float, Field(ge=0, le=1)] = 0.5  # directions are scaled by variance^(−power/2)
    steps: Positive = 40
    batch: Positive | None = None  # expected images a step: sample_rate = batch / size_hint; None: all, sample_rate 1
    learning_rate: PositiveFloat = 60.0
    last_rate: Annotated[float, Field(gt=0, le=1)] = 1.0  # part of the learning rate that the last step has
    momentum: Fraction = 0.9
    max_norm: Annotated[float, Field(gt=0, le=1.4143)] = 1.4142  # C, clip of an image's errors; none is longer than √2
    ridge: PositiveFloat | None = None  # λ of the preconditioner λ(covariance + λ)⁻¹; None: no preconditioner
    average: Share = 0.5  # the last part of the steps, whose mean is the result

    @classmethod
    def constants(cls, fitted_on: str, epsilon: float) -> dict[str, float]:
        """The settings that follow from public numbers: a, b of TEACHER give a·(b/a)^log10(ε), ε cut to 1..10."""
        power = math.log10(min(max(epsilon, 1.0), 10.0))
        found = {name: low * (high / low) ** power for name, (low, high) in TEACHER.get(fitted_on, {}).items()}
        return {name: round(value) if name in ("dimension", "steps") else value for name, value in found.items()}

    def reads(self, name: str) -> bool:
        if name in ("public", "auxiliary"):
            return name == self.fitted_on
        return name != "classifier" or self.feature == "classifier"


class Select(Settings):
    """Which public images the warm-up sees, or the release holds.

    By votes: all images of the classes with the most of them (RPGen stage 1, PrivImage). By the teacher: of each
    sensitive class, the images that the teacher is surest of (METHODS §9c).
    """

    chooser: ClassVar[str] = "by"
    by: Literal["votes", "teacher"] = "votes"
    ratio: Share = 0.05  # by votes: part of the public classes to keep
    count: Positive | None = None  # by votes: so many public classes instead
    images: Positive = 20_000  # by the teacher: of all classes together, equally many of each

    def reads(self, name: str) -> bool:
        return name == "public" or name == {"votes": "histogram", "teacher": "teacher"}[self.by]


class Fit(Settings):
    """How a generator is fitted to noisy releases."""

    steps: Positive = 600
    batch: Positive = 200
    learning_rate: PositiveFloat = 8e-3  # falls to zero by a cosine
    labels: Literal["uniform", "prior"] = "uniform"
    images: Positive = 20_000  # N_f


class Auxiliary(Fit):
    """One-step generator fitted to the frequency release, and the images it draws (FETA-Pro §3.3, METHODS §9c)."""

    latent: Positive = 32
    width: Positive = 40
    # the release that its images shall match; that of covariances has Gaussians in the place of a network
    target: Literal["frequency", "moments", "covariance"] = unwritten("frequency")
    details: bool = unwritten(False)  # what is finer than the Gaussians are is taken from the public images
    # what draws: one step of a generator, or `solver` steps of a diffusion model of this width
    network: Literal["generator", "denoiser"] = unwritten("generator")
    solver: Positive = unwritten(4)

    def reads(self, name: str) -> bool:
        if name == "public":
            return self.details
        return name not in ("frequency", "moments", "covariance") or name == self.target

    @model_validator(mode="after")
    def details_of_gaussians(self) -> Auxiliary:
        if self.details and self.target != "covariance":
            raise ValueError(f"details go with target: covariance, not with target: {self.target}: leave them out")
        return self


class Learned(Strict):
    """A network trained on the generator's images, as the teacher labels them: free, for these were released."""

    width: Positive = 32
    steps: Positive = 600
    batch: Positive = 128
    learning_rate: PositiveFloat = 0.1  # peak of a one-cycle schedule
    dimension: Positive = 512  # principal directions of its last cells
    power: Annotated[float, Field(ge=0, le=1)] = 0.5  # directions are scaled by variance^(−power/2)


class Embedding(QuerySettings):
    """Noisy joint Fourier embedding as `frequency`, of features that were learned on what was released (METHODS §9c).

    The features are those of the teacher and of a network trained on the generator's images.
    """

    noise: Noise = "2%"
    size: Annotated[int, Field(ge=2, multiple_of=2)] = 10_000  # K
    length_scales: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = (1.22, 0.63)  # in units of √d
    teacher: Annotated[float, Field(gt=0, lt=1)] = 0.5  # share of the squared norm; the rest is the network's
    learned: Learned = Learned()


class Refine(Fit):
    """The generator fitted further: to both releases, and to what the teacher sees in its images (METHODS §9c)."""

    steps: Positive = 300
    learning_rate: PositiveFloat = 4e-3
    weight: PositiveFloat = 2.0  # of the learned features' release, against 1 for that of `frequency`
    agreement: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01  # weight of the teacher's cross-entropy


class Model(Strict):
    """The class-conditional U-Net (reference sizes: METHODS §8), or a public text-to-image model in its place.

    With `directory`, the keys of our own network say nothing, and the model's own files say what it is.
    """

    width: Positive = 32
    multipliers: Annotated[tuple[Positive, ...], Field(min_length=1)] = (2, 2)
    attention: tuple[int, ...] = (1,)  # levels (0 is the finest) that get self-attention
    blocks: Positive = 1  # residual blocks per level
    unshuffle: Literal[1, 2, 4] = 1  # pixel-unshuffle stem: train at resolution / unshuffle
    sigma_data: PositiveFloat = 0.5
    label_dropout: Fraction = 0.1
    # a latent diffusion model as diffusers lays it out, or hub:owner/name[@revision]; None: our own network
    directory: str | None = None
    # of that model, as `stage pretrain` prints it
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    # side that images are resized to before they are encoded; None: what the model was trained at
    image_size: Positive | None = None
    # the class prompts' template, with {class}, {article} or {number}; None: by data.dataset_id
    prompt: str | None = None
    prompts: dict[str, str] = {}  # class name -> its whole prompt, instead of the template
    # said by the owner of a model that carries no privacy.json: it was not made from sensitive images
    declared_public: bool = False

    def network(self) -> dict[str, Any]:
        """The arguments of our own U-Net."""
        return self.model_dump(mode="json", exclude={"label_dropout", "declared_public", *PUBLIC_MODEL})

    def resolved(self) -> dict[str, Any]:
        """What the stages that train may depend on: the keys of the network in use, and no others."""
        if self.directory:
            return self.model_dump(mode="json", include={"label_dropout", *PUBLIC_MODEL})
        return self.network() | {"label_dropout": self.label_dropout}


PUBLIC_MODEL = ("directory", "sha256", "image_size", "prompt", "prompts")  # the keys of a public model


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


class Amp(Strict):
    """Adversarial model perturbation (RPGen stage 2): descend at the worst weights nearby. Radius 0: plain training."""

    radius: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.2  # γ
    rate: PositiveFloat = 0.4  # η₁, of the ascent
    steps: Positive = 1  # of the ascent


class Phase(Strict):
    """One phase of the warm-up: denoising training on released or public images.

    With "frequency" as its source, which has no images, the model itself is fitted to that release, as the auxiliary
    generator is, through `solver` steps of its sampler.
    """

    # name -> weight
    sources: Annotated[
        dict[Literal["central", "frequency", "auxiliary", "refine", "evolve", "public"], PositiveFloat],
        Field(min_length=1),
    ]
    steps: Positive
    batch: Positive = 64
    learning_rate: PositiveFloat = 3e-4
    augment: Annotated[int, Field(ge=0, le=14)] = 0  # RandAugment operations per image
    amp: Amp | None = None  # `amp: true` in a recipe stands for that of all phases
    solver: Positive = unwritten(4)  # of "frequency"

    @property
    def fits(self) -> bool:
        """Whether it fits the model to the frequency release."""
        return "frequency" in self.sources

    @model_validator(mode="after")
    def fits_alone(self) -> Phase:
        if self.fits and (len(self.sources) > 1 or self.augment or self.amp is not None):
            raise ValueError(
                "a phase with the source frequency fits the model to that release, and shows it no image: "
                "give it no other source, no augment and no amp"
            )
        return self


class Pretrain(Settings):
    """The curriculum: phases in order. `part` of a phase is its part of `steps`.

    A phase has the batch and the learning rate of all, unless it names its own.
    """

    chooser: ClassVar[str] = "phases"
    phases: tuple[Phase, ...] = ()
    steps: Positive = 2000  # of all phases together
    batch: Positive = 64
    learning_rate: PositiveFloat = 3e-4
    median: Annotated[int, Field(ge=0)] = 3  # median blur of central images (0: none)
    ema: Fraction = 0.999
    noise_levels: NoiseLevels = LogNormal()
    amp: Amp = Amp()  # of the phases that ask for it

    @model_validator(mode="before")
    @classmethod
    def fill_phases(cls, values: Any) -> Any:
        """Give each phase its steps, batch and learning rate, so that what is resolved says all."""
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
            part = phase.get("part", 1)
            steps = max(1, round(common["steps"] * part / whole)) if whole else 1
            phase = {**common, "steps": steps, **{key: value for key, value in phase.items() if key != "part"}}
            if isinstance(phase.get("amp"), bool):
                phase["amp"] = values.get("amp", {}) if phase["amp"] else None
            filled.append(phase)
        return {**values, "phases": filled}

    def reads(self, name: str) -> bool:
        """Of a phase that shows public images, the selection too; of one that fits a release, the counts."""
        source = {"select": "public", "count": "frequency"}.get(name, name)
        return any(source in phase.sources for phase in self.phases)


class Saliency(QuerySettings):
    """Noisy gradient norms of the weight matrices (DP-SAPF §3.2). `finetune` decides, at no cost, which are trained."""

    noise: Noise = "2%"
    max_norm: PositiveFloat = 1.0  # C_s, the L2 clip of one image's gradient over all candidates
    candidates: Literal["qkv", "qkvo", "matrices", "layers"] = "qkv"
    score: Literal["gradient", "snip"] = "gradient"
    draws: Positive = 1  # noise levels per image, averaged before the clip
    noise_levels: NoiseLevels = LogNormal()
    chunk: Positive | None = machine(None)  # images whose gradients are taken together; None: by the model's size


class Lora(Strict):
    """Low-rank adapters: W' = W + scale · A·B (METHODS §8)."""

    rank: Positive = 4
    scale: PositiveFloat = 1.0  # α/r


Trainable = Literal[
    "all", "attention", "attention-lora", "salient", "salient-lora", "random-lora", "synflow-lora", "noisy"
]
SALIENT = ("salient", "salient-lora", "noisy")  # those that the saliency query chooses


class Descent(QuerySettings):
    """DP-SGD on some network (METHODS §8)."""

    releases: ClassVar[str] = "steps"

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
    chunk: Positive | None = machine(None)  # images whose gradients are taken together; None: by the model's size
    checkpoint_every: Positive = machine(10)  # steps

    @property
    def measured(self) -> tuple[int, ...]:
        """Steps after which a curve is measured."""
        return ()


class Finetune(Descent):
    """DP-SGD on the diffusion model (METHODS §8)."""

    chooser: ClassVar[str] = "trainable"
    trainable: Trainable = "all"  # which weights; the salient ones are those that `saliency` chose
    ratio: Share = 0.3  # c: part of the candidate matrices, for the sets that choose some
    debias: bool = True  # salient ones are ranked by their norm less what the noise adds to it
    lora: Lora = Lora()
    # steps after which a sample is compared with real images: the run is then local, nothing of it is released
    convergence: tuple[Positive, ...] = ()

    @model_validator(mode="after")
    def convergence_within_the_run(self) -> Finetune:
        if self.convergence and max(self.convergence) > self.steps:
            raise ValueError(
                f"finetune.convergence names step {max(self.convergence)}, and finetune.steps is {self.steps}: "
                f"name steps from 1 to {self.steps}"
            )
        return self

    @property
    def measured(self) -> tuple[int, ...]:
        return self.convergence

    def reads(self, name: str) -> bool:
        return name != "saliency" or self.trainable in SALIENT


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


# the stages whose models draw images, `evolve`, which holds a population, and `select`, which chooses public ones
Drawable = Literal["finetune", "pretrain", "refine", "auxiliary", "evolve", "adversarial", "select"]


class Synthesize(Settings):
    """What is released: images drawn from a weighted mixture of the models at hand."""

    chooser: ClassVar[str] = "sources"
    count: Positive = 10_000
    sources: Annotated[dict[Drawable, PositiveFloat], Field(min_length=1)] = {"finetune": 1.0}
    steps: Positive = 18  # Heun steps
    guidance: Annotated[float, Field(ge=0)] = 0.0  # 0: none; g: D + g·(D − D_unconditional)
    labels: Literal["prior", "uniform"] = "prior"
    # PNG and Parquet files say that the images are generated, by IPTC's digital source type; public ones what they are
    marked: bool = True
    # 0: none; 1: D moves towards its label by Bayes' rule, as the teacher sees it (diffusion models that draw pixels)
    teacher_guidance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = unwritten(0.0)
    relabel: bool = False  # released with the teacher's labels, not with those asked of the models
    augmented: Fraction = 0.0  # part of the images that is slightly moved, brightened or blurred
    distorted: Fraction = 0.0  # part that is warped, textured and under another light; needs `relabel`
    mixed: Fraction = 0.0  # part that is blended with images of classes that the teacher confuses with their own
    # further forms beside the arrays: a folder of PNGs a class, one archive, one table
    export: tuple[Literal["png", "npz", "parquet"], ...] = ()

    @model_validator(mode="after")
    def some_stay_plain(self) -> Synthesize:
        if self.augmented + self.distorted + self.mixed >= 1:
            raise ValueError(
                f"augmented={self.augmented:g}, distorted={self.distorted:g} and mixed={self.mixed:g} leave no plain "
                "image: lower one of them"
            )
        if (self.mixed > 0 or self.distorted > 0) and not self.relabel:
            raise ValueError("distorted and mixed images have no label but the teacher's: set relabel: true")
        return self

    def reads(self, name: str) -> bool:
        """Adapters of `finetune` need the weights of `pretrain`, a selection the images that it is of."""
        if name == "teacher":
            return self.relabel or self.teacher_guidance > 0
        needs = {"pretrain": "finetune", "public": "select"}
        return name == "count" or name in self.sources or needs.get(name) in self.sources


Fidelity = Literal["frechet", "mmd", "inception_score", "precision_recall", "fld", "authenticity"]


class Evaluate(Settings):
    """The release measured on real images: local, outside the guarantee (METHODS §9)."""

    chooser: ClassVar[str] = "stages"
    # some of CLASSIFIERS (sfumato/evaluation/classifiers.py)
    classifiers: Annotated[tuple[str, ...], Field(min_length=1)] = ("lr", "mlp", "cnn")
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0, 1, 2)
    stages: tuple[Drawable, ...] = ()  # also score these models, each alone
    images: Positive = 10_000  # drawn per model scored alone
    epochs: Positive = 12
    steps: Positive | None = None  # gradient steps of every training, instead of epochs
    # of wrn, resnet, resnext: small networks for a CPU, or DPImageBench's for a GPU
    schedule: Literal["light", "paper"] = "light"
    # the epoch: the last, or the best on a part of the training images kept apart; never on real ones
    choice: Literal["last", "synthetic"] = "last"
    kept: Annotated[float, Field(gt=0, le=0.5)] = 0.1  # that part
    bound: bool = True  # also train on real images: the upper bound
    # the feature space of all fidelity metrics
    extractor: Literal["embedded", "inception", "torchvision", "torchscript"] = "embedded"
    weights: str | None = None  # local weights file; inception: None for pytorch-fid's own download
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None  # of that file
    model: str | None = None  # torchvision only: the model's name
    reference: Literal["holdout", "train"] = "holdout"  # the real images that synthetic ones are compared with
    fidelity: tuple[Fidelity, ...] | None = None  # None: all that the extractor has; []: no features at all
    neighbours: Positive = 5  # k of precision, recall, density, coverage

    @model_validator(mode="after")
    def extractor_has_what_it_needs(self) -> Evaluate:
        named = f"evaluate.extractor: {self.extractor}"
        if self.extractor in ("torchvision", "torchscript") and self.weights is None:
            raise ValueError(f"{named} needs evaluate.weights, the path of a local weights file")
        if self.extractor == "torchscript" and self.sha256 is None:
            raise ValueError(
                f"{named} needs evaluate.sha256: such a file is a program, and only the one that is meant may run"
            )
        if self.extractor == "embedded" and (self.weights or self.sha256):
            raise ValueError(
                f"{named} has no weights file: leave out evaluate.weights and evaluate.sha256, "
                "or name another extractor"
            )
        if (self.model is not None) != (self.extractor == "torchvision"):
            raise ValueError(
                f"evaluate.model={self.model!r} and {named} do not fit: "
                "torchvision needs a model's name, the others have none"
            )
        if self.fidelity and "inception_score" in self.fidelity and self.extractor != "inception":
            raise ValueError(
                f"evaluate.fidelity names inception_score, which {named} does not have: "
                "set it to inception, or take the score out"
            )
        return self

    teacher: bool = False  # also the accuracy of the teacher, which is the baseline of a release

    def reads(self, name: str) -> bool:
        if name == "teacher":
            return self.teacher
        return name in ("synthesize", "count") or name in self.stages or (name == "public" and "select" in self.stages)

    @property
    def metrics(self) -> tuple[str, ...]:
        """`fidelity`, filled in."""
        if self.fidelity is not None:
            return self.fidelity
        return tuple(name for name in get_args(Fidelity) if name != "inception_score" or self.extractor == "inception")


class Params(Strict):
    """All of `params.yaml`, after the recipe and the defaults have filled it in."""

    recipe: str = "full"
    profile: str | None = "digits"  # the scale of data and compute: pipelines/profiles/<profile>.yaml
    run: tuple[str, ...] = ()  # the stages that are switched on
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    data: Data = Data()
    privacy: Privacy = Privacy()
    release: Release = Release()
    model: Model = Model()
    public: Public = Public()
    count: Count = Count()
    central: Central = Central()
    frequency: Frequency = Frequency()
    classifier: Classifier = Classifier()
    moments: Moments = Moments()
    covariance: Covariance = Covariance()
    auxiliary: Auxiliary = Auxiliary()
    denoiser: Denoiser = Denoiser()
    evolve: Evolve = Evolve()
    adversarial: Adversarial = Adversarial()
    histogram: Histogram = Histogram()
    teacher: Teacher = Teacher()
    embedding: Embedding = Embedding()
    refine: Refine = Refine()
    select: Select = Select()
    pretrain: Pretrain = Pretrain()
    saliency: Saliency = Saliency()
    finetune: Finetune = Finetune()
    synthesize: Synthesize = Synthesize()
    evaluate: Evaluate = Evaluate()

    @model_validator(mode="before")
    @classmethod
    def by_epsilon(cls, values: dict[str, Any]) -> dict[str, Any]:
        """What is left to ε: constants of the teacher, shares and weights by ε. Other mistakes are found afterwards."""
        teacher, privacy = values.get("teacher", {}), values.get("privacy", {})
        epsilon = privacy.get("epsilon", Privacy().epsilon) if isinstance(privacy, dict) else None
        if not is_positive(epsilon):
            return values
        if isinstance(teacher, dict):
            rule = Teacher.constants(str(teacher.get("fitted_on", Teacher().fitted_on)), epsilon)
            values = {**values, "teacher": rule | teacher}
        for name, section in values.items():
            if isinstance(section, dict) and isinstance(table := section.get("noise"), dict):
                values = {**values, name: {**section, "noise": noise_at(epsilon, table)}}
        synthesize = values.get("synthesize")
        if isinstance(synthesize, dict) and isinstance(sources := synthesize.get("sources"), dict):
            values = {**values, "synthesize": {**synthesize, "sources": weights_at(epsilon, sources)}}
        return values

    @field_validator("run")
    @classmethod
    def known_stages(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        known = [name for name in cls.model_fields if cls.settings_of(name)]
        for name in names:
            if name not in known:
                raise ValueError(f"{name!r} is not a stage that can be switched on: {nearest(name, known)}")
        return names

    @model_validator(mode="after")
    def spends_on_queries(self) -> Params:
        for name in self.privacy.spend_again:
            kind = self.settings_of(name)
            if kind is None or not issubclass(kind, QuerySettings):
                raise ValueError(f"privacy.spend_again names {name!r}, which is no query: only queries spend")
        return self

    @classmethod
    def settings_of(cls, stage: str) -> type[Settings] | None:
        """The parameters of a stage by its name; None where `stage` is another section."""
        kind = cls.model_fields[stage].annotation if stage in cls.model_fields else None
        return kind if isinstance(kind, type) and issubclass(kind, Settings) else None

    def runs(self, stage: str) -> bool:
        return stage in self.run
