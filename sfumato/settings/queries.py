"""Settings of the queries that release sums."""

import math
from typing import Annotated, ClassVar, Literal, Self

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
    # Statistic per class: mean, or mode (for each pixel, the bin with the most images)
    statistic: Literal["mean", "mode"] = "mean"
    repeats: Positive = 5  # Number of releases; each release contains one central image per class
    batch: Positive = 6000  # Expected images per release: sample_rate = batch / size_hint
    # L2 clip of an image; None: √(number of pixel values), the largest norm of an image
    max_norm: Norm | None = None
    # Histogram bins of a pixel, for the statistic `mode`: 2 suits grey images, 16 colour
    bins: Annotated[int, Field(ge=2, le=256)] = 2


class FeatureMap(Strict):
    """A public map (a function of an image), and a kernel that turns its outputs into features."""

    map: str = "pixels"  # Public map: one of FEATURES (sfumato/features)
    # Kernel whose random features are released. With `linear`, the map's outputs themselves are
    # released; with `squared`, their squares
    kernel: Literal["gaussian", "rational-quadratic", "linear", "squared"] = "gaussian"
    # Length scales of the kernel, each divided by the square root of the map's number of outputs.
    # Example: 28×28 pixels are 784 outputs, so 0.366 means a length scale of 0.366 · 28 = 10.25.
    # No effect with the kernel `linear` or `squared`
    length_scales: Annotated[tuple[Scale, ...], Field(min_length=1)] = (0.366, 0.183)
    # Weight of this map. Its features contribute this share of the squared norm of all features:
    # the weight, divided by the sum of all maps' weights
    weight: Scale = 1.0
    # Side of square blocks, in pixels. The map gets the means of these blocks instead of the pixels
    block: Literal[1, 2, 4, 8] = 1


class Frequency(QuerySettings):
    """Noisy joint random-Fourier embedding of images and labels (FETA-Pro Algorithm 1, DP-MERF)."""

    noise: Noise = 7.4
    # Number of random features. Maps with the kernel `linear` or `squared` have none: their outputs
    # are released in addition to these features
    size: Annotated[int, Field(ge=2, le=10**7, multiple_of=2)] = 10_000
    # Public maps, whose features are concatenated
    features: Annotated[tuple[FeatureMap, ...], Field(min_length=1)] = (FeatureMap(),)


class Covariance(QuerySettings):
    """Noisy means and covariances, by class, of the images' low frequencies (cosine transform)."""

    noise: Noise = 10.0
    # Average each image with its mirror image, which halves the dimension and suits photographs
    flip: bool = False


class Moments(QuerySettings):
    """Noisy means, by class, of a public network's features and of the squares of these features
    (DP-MEPF).
    """

    noise: Noise = 20.0


class Histogram(QuerySettings):
    """Noisy number of votes for each class of the public set (RPGen stage 1, PrivImage).

    Each sensitive image votes for the classes that the public classifier finds most likely for it.
    """

    noise: Noise = 50.0
    # Number of votes per image. An image gives one vote to each of its `votes` most likely public
    # classes. The L2 sensitivity is √votes
    votes: Positive = 1
    # Release one histogram per sensitive class (PrivImage), instead of one for all classes (RPGen)
    per_class: bool = False


CONVERT = (
    "a file that contains both the code and the weights of a network, such as a TorchScript file, "
    "is a program, and programs are not run. Set `architecture` to a classification model of "
    "torchvision, and save its weights as safetensors (docs/howto.md shows how)"
)


class OwnNetwork(Strict):
    """A torchvision classification model, chosen by name, with weights in a safetensors file.

    No code in the file is run.
    """

    path: str  # Path of the weights, a safetensors file
    # Expected sha256 of the file, 64 hexadecimal digits
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    # Name of a torchvision classification model, such as resnet18. The name efficientnet_lite0
    # is also accepted. The model's last linear layer is left out
    architecture: str
    # Side in pixels to which images are resized; None: no resizing
    side: Annotated[int, Field(gt=0, le=2048)] | None = None
    # Number of channels that the network's first layer expects. For 3, the channel of a grey image
    # is repeated; for 1, the channels of a colour image are averaged
    channels: Literal[1, 3] = 3
    # Mean to subtract from the pixels, which range from 0 to 1: one number, or one per channel
    mean: tuple[float, ...] = (0.0,)
    # Standard deviation by which the pixels are divided after subtracting the mean: one number, or
    # one per channel
    std: tuple[PositiveFloat, ...] = (1.0,)
    # Owner's confirmation that the network was not trained on sensitive images
    declared_public: bool = False

    @model_validator(mode="before")
    @classmethod
    def names_an_architecture(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("architecture") is None:
            raise ValueError(f"architecture is missing: {CONVERT}")
        return values

    @model_validator(mode="after")
    def numbers_fit_the_channels(self) -> Self:
        if not {len(self.mean), len(self.std)} <= {1, self.channels}:
            raise ValueError(
                f"mean has length {len(self.mean)} and std has length {len(self.std)}, but "
                f"channels is {self.channels}: each must contain one number, or one number per "
                "channel"
            )
        return self

    def arguments(self) -> dict[str, object]:
        """Return the settings from which the network can be built."""
        return self.model_dump(exclude={"declared_public"})


class TeacherMap(Strict):
    """One of several public maps (functions of an image). Their outputs are concatenated."""

    map: str  # Public map: one of the values of teacher.feature
    network: OwnNetwork | None = None  # The owner's network, for the map `own`
    # Weight of this map. Its features contribute this share of the squared norm of all features:
    # the weight, divided by the sum of all maps' weights
    weight: Scale = 1.0


# Defaults of `Teacher`, by `fitted_on`. The first number is for ε up to 1, the second for ε from
# 10 on. In between, a default is proportional to a power of ε
TEACHER_CONSTANTS: dict[str, dict[str, tuple[float, float]]] = {
    "public": {
        "dimension": (256, 512),
        "power": (0.8, 0.5),
        "steps": (25, 40),
        "learning_rate": (12.0, 60.0),
    },
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
    """A linear classifier on public features, trained by noisy gradient steps.

    Use few steps with a high learning rate. Each step is a noisy release, so more steps need more
    noise in each step, or more ε. Most defaults depend on `fitted_on` and on privacy.epsilon. The
    defaults below are for `fitted_on: public` and ε = 10.
    """

    chooser: ClassVar[str] = "feature"
    releases: ClassVar[str] = "steps"
    noise: Noise = "10%"
    # Public map: `classifier` for the network that the stage `classifier` trains, `own` for
    # teacher.network, or one of FEATURES (sfumato/features). The imagenet maps use a network
    # trained on photographs and require sfumato[imagenet]
    feature: str = "classifier"
    network: OwnNetwork | None = None  # The owner's network, for the feature `own`
    # Several maps, to be used instead of `feature`. Their outputs are concatenated
    features: tuple[TeacherMap, ...] = ()
    flip: bool = False  # Give an image and its mirror image the same features
    # Images on which the principal component analysis of the features is fitted: the public set, or
    # the images drawn by `auxiliary`
    fitted_on: Literal["public", "auxiliary"] = "public"
    dimension: Positive = 512  # Maximum feature dimension
    # Power p: each principal component of the features is multiplied by variance^(−p/2)
    power: Annotated[float, Field(ge=0, le=1)] = 0.5
    steps: Positive = 40  # Gradient steps; each is one release
    # Expected images per step: sample_rate = batch / size_hint; None: all images, sample_rate 1
    batch: Positive | None = None
    learning_rate: Annotated[float, Field(ge=1e-9, le=1e6)] = 60.0  # Initial learning rate
    # Final learning rate, as a share of the initial one. In between, the rate falls linearly
    last_rate: Share = 1.0
    momentum: Fraction = 0.9  # Momentum of the gradient steps
    # L2 clip C of an image's errors. The error in a class is the label (1 or 0) minus the predicted
    # probability. With one label per image, the norm of the errors is at most √2
    max_norm: Annotated[Norm, Field(le=1.4143)] = 1.4142
    # Ridge λ of the preconditioner of the gradient steps, λ(C + λ)⁻¹, with the covariance C of the
    # features; None: no preconditioner
    ridge: PositiveFloat | None = None
    # Share of the steps to average. The result is the mean of the weights after each of the last
    # steps: with 0.5, after each step of the second half
    average: Share = 0.5

    @model_validator(mode="before")
    @classmethod
    def a_list_takes_the_place_of_the_feature(cls, values: object) -> object:
        """Remove `feature` if `features` is given.

        A list of one map becomes `feature`, so that both forms have the same digest.
        """
        if not isinstance(values, dict):
            return values
        features = values.get("features")
        if not isinstance(features, (list, tuple)) or not features:
            return values
        if values.get("network") is not None:
            raise ValueError(
                "teacher.network applies only to teacher.feature. With teacher.features, set "
                "`network` in the entry of each map `own`"
            )
        rest = {key: value for key, value in values.items() if key != "feature"}
        if len(features) > 1:
            return rest
        only_map = TeacherMap.model_validate(features[0])
        return rest | {"features": (), "feature": only_map.map, "network": only_map.network}

    @model_validator(mode="after")
    def own_feature_has_a_network(self) -> Self:
        for part in self.maps:
            if part.map == "own" and part.network is None:
                raise ValueError(
                    "teacher: the map `own` requires a network of your own: add `network`, with "
                    "`path`, `sha256` and `architecture`"
                )
            if part.map != "own" and part.network is not None:
                raise ValueError(
                    f"teacher: `network` is set, but the map is `{part.map}`: set the map to "
                    "`own`, or remove `network`"
                )
        return self

    @property
    def maps(self) -> tuple[TeacherMap, ...]:
        """Return the maps in `features`, or the single map of `feature`."""
        return self.features or (TeacherMap(map=self.feature, network=self.network),)

    @classmethod
    def constants(cls, fitted_on: str, epsilon: float) -> dict[str, float]:
        """Return the settings that depend on ε.

        For each pair (a, b) in TEACHER_CONSTANTS, the value is a·(b/a)^log10(ε), with ε limited to
        the range from 1 to 10.
        """
        power = math.log10(min(max(epsilon, 1.0), 10.0))
        pairs = TEACHER_CONSTANTS.get(fitted_on, {})
        constants = {name: low * (high / low) ** power for name, (low, high) in pairs.items()}
        return constants | {
            name: round(constants[name]) for name in ("dimension", "steps") if name in constants
        }

    def reads(self, name: str) -> bool:
        if name in ("public", "auxiliary"):
            return name == self.fitted_on
        return name != "classifier" or any(part.map == "classifier" for part in self.maps)


class Learned(Strict):
    """A network trained on the generator's images with the teacher's labels, at no privacy cost."""

    steps: Positive = 600  # Training steps of the network


class Embedding(QuerySettings):
    """Noisy class means of random Fourier features, as in `frequency`.

    The Fourier features are computed from the teacher's features, and from the features of a
    network trained on the generator's images.
    """

    noise: Noise = "2%"
    # Number of random features
    size: Annotated[int, Field(ge=8, le=10**7, multiple_of=2)] = 10_000
    learned: Learned = Learned()  # Network trained on the generator's images
