"""The section `evaluate`: the release measured on real images."""

from typing import Annotated, Literal

from pydantic import Field

from sfumato.settings.fields import Positive, Settings
from sfumato.settings.queries import OwnNetwork


class Evaluate(Settings):
    """The release measured on real images: local, outside the guarantee."""

    # what is trained on synthetic images and tested on the hold-out: lr, mlp, cnn, student, wrn, resnet, resnext
    classifiers: Annotated[tuple[str, ...], Field(min_length=1)] = ("lr", "mlp", "cnn")
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0, 1, 2)  # each classifier is trained once per seed
    epochs: Positive = 12  # passes of a training over its images; at least 600 gradient steps
    steps: Positive | None = None  # gradient steps of every training; None: by epochs
    bound: bool = True  # also train on the real training images: the upper bound
    # a second student, linear on a public network: imagenet (needs sfumato[imagenet]), or one's own; None: none
    public_student: OwnNetwork | Literal["imagenet"] | None = None
    # feature space of the fidelity metrics: a small network trained on drawn images; Inception, which is downloaded; or
    # small pictures, which cost next to nothing and are for the test for copies
    extractor: Literal["embedded", "inception", "pixels"] = "embedded"
    network: OwnNetwork | None = None  # of the owner's, which gives the feature space instead
    weights: str | None = None  # local weights file of Inception; None: pytorch-fid's own download
    # metrics to compute (see Fidelity numbers); None: all that the extractor has; []: none
    fidelity: tuple[str, ...] | None = None
