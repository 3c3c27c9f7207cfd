"""The section `evaluate`: measurement of the release on real images."""

from typing import Annotated, Literal

from pydantic import Field

from sfumato.settings.fields import Positive, Settings
from sfumato.settings.queries import OwnNetwork

# Classifiers that `sfumato.evaluation.classifiers` can build
ClassifierName = Literal["lr", "mlp", "cnn", "student", "wrn", "resnet", "resnext"]


class Evaluate(Settings):
    """Measurement of the release on real images. The results are local: they are outside the
    guarantee and must not be shared.
    """

    # Classifiers to train on synthetic images and test on the hold-out
    classifiers: Annotated[tuple[ClassifierName, ...], Field(min_length=1)] = ("lr", "mlp", "cnn")
    # Seeds of the training runs. Each classifier is trained once per seed
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0, 1, 2)
    # Number of passes over the training images. It is increased if the passes have fewer than 600
    # gradient steps in total
    epochs: Positive = 12
    # Gradient steps of each training run; None: the steps of `epochs` passes
    steps: Positive | None = None
    # Also train the classifiers on the real training images, to get an upper bound of the accuracy
    bound: bool = True
    # Public network to compute features for one more classifier, a linear one: `scattering` (fixed
    # wavelets), `imagenet` (requires sfumato[imagenet]) or a network of your own; None: no such
    # classifier
    public_student: OwnNetwork | Literal["scattering", "imagenet"] | None = None
    # Feature space of the fidelity metrics. `embedded`: a small network, trained on pictures that
    # the program draws itself; `inception`: a downloaded network; `pixels`: small versions of the
    # pictures, which are fast to compare and good enough to find copies
    extractor: Literal["embedded", "inception", "pixels"] = "embedded"
    # Network of your own for the feature space, to replace `embedded`. With another `extractor`, it
    # has no effect
    network: OwnNetwork | None = None
    weights: str | None = None  # Path of Inception's weights; None: downloaded by pytorch-fid
    # Metrics to compute (see Fidelity numbers); None: all that the extractor supports; []: none
    fidelity: tuple[str, ...] | None = None
