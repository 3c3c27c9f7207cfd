"""Settings of the queries that release sums."""

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sfumato.settings.fields import Fraction, Norm, Positive, PositiveFloat, Scale, Share, Strict
from sfumato.settings.noise import Noise, QuerySettings


class Count(QuerySettings):
    """One noisy release of the class counts."""

    noise: Noise = 50.0


class Central(QuerySettings):
    """Noisy central images per class (DP-FETA §3.1)."""

    releases: ClassVar[str] = "repeats"
    noise: Noise = 5.0
    statistic: Literal["mean", "mode"] = "mean"  # of the images of a class: their mean, or each pixel's fullest bin
    repeats: Positive = 5  # central images per class
    batch: Positive = 6000  # expected images per release: sample_rate = batch / size_hint
    max_norm: Norm | None = None  # L2 clip of an image; None: the largest it can have, √d'
    bins: Annotated[int, Field(ge=2, le=256)] = 2  # mode only: 2 for grey, 16 for colour


class FeatureMap(Strict):
    """One public map of an image, whose random Fourier features are released."""

    map: str = "pixels"  # one of FEATURES (sfumato/features)
    # random features of a kernel, or the map's output ("linear"), or its squares ("squared")
    kernel: Literal["gaussian", "rational-quadratic", "linear", "squared"] = "gaussian"
    # in units of √d: ℓ = 10.25 at 28×28
    length_scales: Annotated[tuple[Scale, ...], Field(min_length=1)] = (0.366, 0.183)
    weight: Scale = 1.0  # share of the squared norm, relative to the other maps
    block: Literal[1, 2, 4, 8] = 1  # the map sees the means of blocks of so many pixels a side


class Frequency(QuerySettings):
    """Noisy joint random-Fourier embedding of images and labels (FETA-Pro Algorithm 1, DP-MERF)."""

    noise: Noise = 7.4
    size: Annotated[int, Field(ge=2, le=10**7, multiple_of=2)] = 10_000  # K, the number of random features
    # the public maps, whose features stand side by side
    features: Annotated[tuple[FeatureMap, ...], Field(min_length=1)] = (FeatureMap(),)


class Covariance(QuerySettings):
    """Noisy means and covariances, by class, of the low frequencies of the images: of their cosine transform."""

    noise: Noise = 10.0
    flip: bool = False  # average each image with its mirror image (photographs): halves the dimension


class Moments(QuerySettings):
    """Noisy means, by class, of a public network's features of an image, and of their squares (DP-MEPF)."""

    noise: Noise = 20.0


class Histogram(QuerySettings):
    """Noisy counts of the sensitive images by the public class that they fall into (RPGen stage 1, PrivImage)."""

    noise: Noise = 50.0
    votes: Positive = 1  # classes that an image votes for, the likeliest first: Δ = √votes
    per_class: bool = False  # one histogram for each sensitive class (PrivImage), not one for all (RPGen)


CONVERT = (
    "a file that holds its own network, such as TorchScript, is a program, and none is run. Name a classification "
    "model of torchvision in `architecture`, and save its weights as safetensors: docs/howto.md shows how"
)


class OwnNetwork(Strict):
    """A classification model of torchvision by name, with weights in safetensors: nothing of the file is run."""

    path: str  # of the weights, a safetensors file
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # hex sha256 of the file
    # a classification model of torchvision, such as resnet18, or efficientnet_lite0; its last linear layer is left out
    architecture: str
    side: Annotated[int, Field(gt=0, le=2048)] | None = None  # that images are resized to; None: as they are
    channels: Literal[1, 3] = 3  # that it expects; grey is repeated
    mean: tuple[float, ...] = (0.0,)  # subtracted from the pixels, which are from 0 to 1: one number, or one a channel
    std: tuple[PositiveFloat, ...] = (1.0,)  # by which they are then divided
    declared_public: bool = False  # owner's confirmation: it was not trained on sensitive images

    @model_validator(mode="before")
    @classmethod
    def names_an_architecture(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("architecture") is None:
            raise ValueError(f"architecture is missing: {CONVERT}")
        return given

    @model_validator(mode="after")
    def numbers_fit_the_channels(self) -> Self:
        if not {len(self.mean), len(self.std)} <= {1, self.channels}:
            raise ValueError(f"mean and std: give one number each, or {self.channels}, one a channel")
        return self

    def arguments(self) -> dict[str, Any]:
        """Those of `sfumato.features.own_network.OwnFeatures`."""
        return self.model_dump(exclude={"declared_public"})


class TeacherMap(Strict):
    """One of several public maps of an image, side by side."""

    map: str  # as of teacher.feature
    network: OwnNetwork | None = None  # of the map own
    weight: Scale = 1.0  # share of the squared norm, relative to the other maps


# defaults of `Teacher` at ε up to 1 and from 10 on; between them a power of ε
TEACHER_CONSTANTS: dict[str, dict[str, tuple[float, float]]] = {
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
    """A linear classifier on public features, by noisy gradient steps over all images.

    With few steps and a high rate: each step releases as many numbers as the classifier has. What is left out follows
    from `fitted_on` and privacy.epsilon; the defaults here are those at ε = 10.
    """

    chooser: ClassVar[str] = "feature"
    releases: ClassVar[str] = "steps"
    noise: Noise = "10%"
    # the network that `classifier` trained, or one of FEATURES (sfumato/features), of which imagenet, a network that
    # photographs trained, needs the extra of that name; own: that of teacher.network
    feature: str = "classifier"
    network: OwnNetwork | None = None  # of the feature own
    features: tuple[TeacherMap, ...] = ()  # several maps side by side, instead of `feature`
    flip: bool = False  # an image and its mirror image have the same features, as of photographs
    fitted_on: Literal["public", "auxiliary"] = "public"  # images whose principal directions span the features
    dimension: Positive = 512  # of the features, at most
    power: Annotated[float, Field(ge=0, le=1)] = 0.5  # directions are scaled by variance^(−power/2)
    steps: Positive = 40  # gradient steps, each of which is a release
    batch: Positive | None = None  # expected images a step: sample_rate = batch / size_hint; None: all, sample_rate 1
    learning_rate: Annotated[float, Field(ge=1e-9, le=1e6)] = 60.0  # of the first step
    last_rate: Share = 1.0  # part of the learning rate that the last step has
    momentum: Fraction = 0.9  # of the gradient steps
    max_norm: Annotated[Norm, Field(le=1.4143)] = 1.4142  # C, clip of an image's errors; none is longer than √2
    ridge: PositiveFloat | None = None  # λ of the preconditioner λ(covariance + λ)⁻¹; None: no preconditioner
    average: Share = 0.5  # the last part of the steps, whose mean is the result

    @model_validator(mode="before")
    @classmethod
    def a_list_takes_the_place_of_the_feature(cls, given: Any) -> Any:
        """Of the recipe's, too. A list of one is the feature itself, and has its digest."""
        listed = isinstance(given, dict) and given.get("features")
        if not isinstance(listed, (list, tuple)) or not listed:
            return given
        if given.get("network") is not None:
            raise ValueError("teacher.network is of teacher.feature: of a map in features, give it there")
        rest = {key: value for key, value in given.items() if key != "feature"}
        if len(listed) > 1:
            return rest
        alone = TeacherMap.model_validate(listed[0])
        return rest | {"features": (), "feature": alone.map, "network": alone.network}

    @model_validator(mode="after")
    def own_feature_has_a_network(self) -> Self:
        if any((part.map == "own") != (part.network is not None) for part in self.maps):
            raise ValueError("teacher: a map named own and its network go together: give both, or neither")
        return self

    @property
    def maps(self) -> tuple[TeacherMap, ...]:
        """What `features` lists, or the one of `feature`."""
        return self.features or (TeacherMap(map=self.feature, network=self.network),)

    @classmethod
    def constants(cls, fitted_on: str, epsilon: float) -> dict[str, float]:
        """The settings that follow from public numbers: a·(b/a)^log10(ε) of TEACHER_CONSTANTS, ε cut to 1..10."""
        power = math.log10(min(max(epsilon, 1.0), 10.0))
        ends = TEACHER_CONSTANTS.get(fitted_on, {})
        constants = {name: low * (high / low) ** power for name, (low, high) in ends.items()}
        return constants | {name: round(constants[name]) for name in ("dimension", "steps") if name in constants}

    def reads(self, name: str) -> bool:
        if name in ("public", "auxiliary"):
            return name == self.fitted_on
        return name != "classifier" or any(part.map == "classifier" for part in self.maps)


class Learned(Strict):
    """A network trained on the generator's images, as the teacher labels them: free, for these were released."""

    steps: Positive = 600  # of its training


class Embedding(QuerySettings):
    """Noisy joint Fourier embedding as `frequency`, of features that were learned on what was released.

    The features are those of the teacher and of a network trained on the generator's images.
    """

    noise: Noise = "2%"
    size: Annotated[int, Field(ge=8, le=10**7, multiple_of=2)] = 10_000  # K, at least two for each of 4 length-scales
    learned: Learned = Learned()  # the network trained on the generator's images
