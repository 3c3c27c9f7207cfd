"""The section `evaluate`: the release measured on real images."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from sfumato.settings.fields import Positive, Settings
from sfumato.settings.release import Drawable

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
