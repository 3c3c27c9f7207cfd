"""The sections `release` (the owner's statements) and `synthesize` (how the release is made)."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sfumato.settings.fields import Fraction, Positive, Scale, Settings, Strict
from sfumato.settings.stages import STAGES

# Kinds of publisher, and sectors, in OpenDP's Deployments Registry
Publisher = Literal["Government", "Industry", "Nonprofit"]
Sector = Literal["Technology", "Healthcare", "Education", "Government", "Energy", "Finance"]
# categories of Regulation (EU) 2025/327 (EHDS), Article 51, by their codes in the EU's vocabulary
HealthCategory = Literal[
    "EHRS", "DIOH", "NRPE", "RPDG", "HRAD", "HGPD", "HPML", "PGEH", "WELA",
    "IDHP", "PHDR", "MRMR", "EHCT", "EMRD", "RMMD", "RQSH", "EINS",
]  # fmt: skip
Web = Annotated[str, Field(pattern=r"^https?://\S+$")]
Line = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\r\n]+$")]


class Release(Strict):
    """Statements of the owner about the release. Each is one line of at most 500 characters.

    They become public: the release's cards and reports quote them. No query depends on them, so
    changing them costs nothing.
    """

    owner: Line | None = None  # Publisher of the set
    # Kind of publisher, for the entry in OpenDP's Deployments Registry (deployment.yaml)
    owner_type: Publisher | None = None
    contact: Line | None = None  # Address for questions about the set
    purpose: Line | None = None  # Purpose of the set
    # Controller of the personal data, if it is someone other than the owner
    controller: Line | None = None
    # Legal basis for making and sharing the set, such as an article of the GDPR
    legal_basis: Line | None = None
    recipients: Line | None = None  # Recipients of the set
    retention: Line | None = None  # Retention period of the set and of the sensitive images
    # Address at which a person can withdraw their images, and how this changes later releases
    withdrawal: Line | None = None
    incident_contact: Line | None = None  # Address for reports of a suspected breach
    region: Line | None = None  # Region from which the images come, or whose laws apply
    sector: Sector | None = None  # Sector in which the publisher works
    # Licence of the set: an SPDX identifier in lower case, such as cc-by-4.0
    licence: Line | None = None
    # Web address of the folder where the set will be published
    url: Web | None = None
    # Category of the real images in the EU's health catalogue, for healthdcat.ttl, such as EHRS
    # (from health records) or MRMR (from medical registries)
    health_category: HealthCategory | None = None
    # Health data access body that decides on access to the real images
    access_body: Line | None = None
    # Web address at which access to the real images can be requested
    access_url: Web | None = None


# Stages with models that draw images, and `select`, which chooses public images
if TYPE_CHECKING:
    Drawable = str
else:
    Drawable = Literal[
        "finetune",
        "pretrain",
        *(name for name in STAGES["synthesize"].upstream if STAGES[name].gives),
        "select",
    ]


class Synthesize(Settings):
    """The release: images drawn from a weighted mixture of the models."""

    chooser: ClassVar[str] = "sources"
    count: Positive = 10_000  # Number of images to draw
    # Stages that provide the images, each with its weight. A weight may depend on ε: {1: 2, 10: 0}
    # is 2 for ε up to 1, and 0 from ε = 10 on
    sources: dict[Drawable, Scale] = Field(default={"finetune": 1.0}, min_length=1)
    steps: Positive = 18  # Heun steps of the diffusion sampler
    # Strength g of classifier-free guidance; 0: off. The denoised image is D + g·(D − D₀), with D
    # computed for its label, and D₀ without a label
    guidance: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    # Distribution of the labels to draw. `uniform`: equally many images of each class. `prior`:
    # shares according to the noisy counts or, if `count` is not in `run`, equal shares
    labels: Literal["prior", "uniform"] = "prior"
    # Strength of guidance by the teacher's class probabilities, for diffusion models that draw
    # pixels; 0: off, 1: the strength that follows from Bayes' rule
    teacher_guidance: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    # Add all images of `select`, with their labels, if they do no harm. To find out, one classifier
    # is trained with these images and one without them, and both are compared with the teacher. The
    # images are added under two conditions. On public images, the classifier with the images of
    # `select` must agree with the teacher at least as often as the classifier without them. On
    # drawn images, its agreement may be up to 2 percentage points lower. If the images are added,
    # only every k-th drawn image is kept, so that drawn and added images are about in the ratio of
    # their weights in `sources`
    choose: bool = False
    # Number of images to draw for each image that is kept; 1: keep all images. The kept images of a
    # class are chosen so that the mean of their features is as close as possible to the `frequency`
    # release. With `relabel`, an image's class is the teacher's label
    herding: Positive = 1
    # Let the teacher label the images. Otherwise, an image has the label for which it was drawn
    relabel: bool = False
    # Minimum agreement (Cohen's kappa) between the teacher's labels of drawn images and the classes
    # for which the images were drawn; 0: no such check. If the agreement is lower, `relabel`,
    # `distorted` and `mixed` have no effect, and each image keeps the class for which it was drawn
    least_agreement: Fraction = 0.0
    # Share of the images to distort: each is warped, multiplied by a texture, and made brighter or
    # darker. Requires `relabel`
    distorted: Fraction = 0.0
    # Share of the images to blend, each with an image of another class. Classes that the teacher
    # tends to confuse with the image's own class are preferred. Requires `relabel`
    mixed: Fraction = 0.0
    # Correction of the teacher's probabilities. With it, each class gets its requested share of the
    # images when the teacher labels them (`relabel`). `plain`: one correction is computed on plain
    # images, and also applied to distorted and blended ones. `each`: plain, distorted and blended
    # images each get their own correction
    shares: Literal["plain", "each"] = "plain"
    # Release the teacher and the image-drawing networks too. Recipients can then draw any number of
    # images (`sfumato.stream`). Requires a source with a network that the recipe trains
    stream: bool = False
    # Formats to write in addition to the arrays: PNGs in one folder per class, one .npz archive,
    # Parquet tables, tar files (webdataset)
    export: tuple[Literal["png", "npz", "parquet", "webdataset"], ...] = ()
    # Files and pixels to mark as generated: `pictures` marks PNG and Parquet files; `files` also
    # marks arrays and tar files; `pixels` also marks the pixels of drawn images, which must have at
    # least 8×16 or 16×8 pixels
    mark: Literal["pictures", "files", "pixels"] = "pictures"

    @model_validator(mode="after")
    def some_stay_plain(self) -> Self:
        if self.distorted + self.mixed >= 1:
            raise ValueError(
                f"distorted={self.distorted:g} and mixed={self.mixed:g} leave no plain image: "
                "expected a sum below 1"
            )
        if (self.mixed > 0 or self.distorted > 0) and not self.relabel:
            raise ValueError(
                "distorted and blended images can only have the teacher's labels: set relabel: true"
            )
        return self

    def networks(self, public_model: bool) -> dict[str, float]:
        """Return the networks from which recipients can draw, with their weights in `sources`.

        Only networks that the recipe trains are included. public_model: True if the diffusion model
        is a public one. It is then left out, because of its licence and its size.
        """
        other_sources = {
            "select",
            *(name for name, stage in STAGES.items() if stage.gives == "images"),
        }
        if public_model:
            other_sources |= {"finetune", "pretrain"}
        return {name: weight for name, weight in self.sources.items() if name not in other_sources}

    def reads(self, name: str) -> bool:
        """Return whether the stage reads this input.

        If `finetune` is a source, `pretrain` is read too, because LoRA adapters need its weights.
        If `select` is a source, the public set is read too.
        """
        if name == "teacher":
            return self.relabel or self.choose or self.teacher_guidance > 0
        if name == "frequency":
            return self.herding > 1
        needs = {"pretrain": "finetune", "public": "select"}
        return name == "count" or name in self.sources or needs.get(name) in self.sources
