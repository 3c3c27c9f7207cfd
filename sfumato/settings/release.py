"""The sections `release` and `synthesize`: what the release holds, and what its owner writes about it."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sfumato.settings import baselines
from sfumato.settings.fields import Fraction, Positive, Scale, Settings, Strict

# the values of OpenDP's Deployments Registry
Publisher = Literal["Government", "Industry", "Nonprofit"]
Sector = Literal["Technology", "Healthcare", "Education", "Government", "Energy", "Finance"]
Line = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\r\n]+$")]


class Release(Strict):
    """The owner's words on the release: for its cards and statements, and public like them.

    No query depends on it, so it may be changed at any time at no cost.
    """

    owner: Line | None = None  # who publishes the set
    owner_type: Publisher | None = None  # kind of publisher, for deployment.yaml
    contact: Line | None = None  # an address that answers questions about it
    purpose: Line | None = None  # what it is for
    controller: Line | None = None  # who answers for the personal data, if not the owner
    legal_basis: Line | None = None  # of making and sharing the set, such as an article of the GDPR
    recipients: Line | None = None  # to whom it is given
    retention: Line | None = None  # how long the set, and the sensitive images, are kept
    withdrawal: Line | None = None  # how a person withdraws, and what that changes about later releases
    incident_contact: Line | None = None  # address to inform of a suspected breach
    region: Line | None = None  # that the images describe, or whose laws apply
    sector: Sector | None = None  # in which the publisher works
    licence: Line | None = None  # an SPDX identifier in small letters, as dataset hubs have them, such as cc-by-4.0
    url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None  # the folder where it will be published


# the stages whose models draw images, those of `baselines`, and `select`, which chooses public ones
Drawable = Literal["finetune", "pretrain", "refine", "auxiliary", baselines.Drawable, "select"]


class Synthesize(Settings):
    """What is released: images drawn from a weighted mixture of the models at hand."""

    chooser: ClassVar[str] = "sources"
    count: Positive = 10_000  # images of the release
    # stage whose model draws -> weight of its images; a mapping {1: 2, 10: 0} makes a weight depend on ε
    sources: dict[Drawable, Scale] = Field(default={"finetune": 1.0}, min_length=1)
    steps: Positive = 18  # Heun steps
    guidance: Annotated[float, Field(ge=0, le=1e3)] = 0.0  # 0: none; g: D + g·(D − D_unconditional)
    labels: Literal["prior", "uniform"] = "prior"
    # guidance by the teacher's class probabilities; 0: off; 1: Bayes' rule (diffusion models that draw pixels)
    teacher_guidance: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    # all images of `select`, as it labels them, join those of the other sources, of which the weights' part then stays,
    # if a student of that mixture agrees with the teacher as well as one of the other sources alone
    choose: bool = False
    # images drawn for each one that is kept: of each class, as the teacher sees it if it relabels, those whose mean is
    # nearest to that of `frequency`
    herding: Positive = 1
    relabel: bool = False  # released with the teacher's labels, not with those asked of the models
    distorted: Fraction = 0.0  # part of the images that is warped, textured and relit; needs `relabel`
    mixed: Fraction = 0.0  # part that is blended with images of classes that the teacher confuses with their own
    # further forms beside the arrays: a folder of PNGs a class, one archive, Parquet tables, tar files
    export: tuple[Literal["png", "npz", "parquet", "webdataset"], ...] = ()
    # what says that images are generated: PNG and Parquet; arrays and tar files too; also a pattern in pixels
    mark: Literal["pictures", "files", "pixels"] = "pictures"

    @model_validator(mode="after")
    def some_stay_plain(self) -> Self:
        if self.distorted + self.mixed >= 1:
            raise ValueError(f"distorted={self.distorted:g} and mixed={self.mixed:g} leave no plain image: lower one")
        if (self.mixed > 0 or self.distorted > 0) and not self.relabel:
            raise ValueError("distorted and mixed images have no label but the teacher's: set relabel: true")
        return self

    def reads(self, name: str) -> bool:
        """Whether it reads this input. LoRA adapters need `pretrain`; `select` needs the public set."""
        if name == "teacher":
            return self.relabel or self.choose or self.teacher_guidance > 0
        if name == "frequency":
            return self.herding > 1
        needs = {"pretrain": "finetune", "public": "select"}
        return name == "count" or name in self.sources or needs.get(name) in self.sources
