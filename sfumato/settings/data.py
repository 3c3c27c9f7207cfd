"""The sections `data` and `public`: where images come from."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, FiniteFloat, field_validator, model_validator

from sfumato.errors import ConfigError
from sfumato.settings.fields import Fraction, Part, Positive, Size, Strict
from sfumato.settings.sources import OF_THE_OWNER, OWNERS, SOURCES
from sfumato.storage.documents import class_name, dataset_name

DatasetId = Annotated[str, AfterValidator(dataset_name)]
ClassName = Annotated[str, AfterValidator(class_name)]
# units of privacy: one image with its label, or all images of one person
IMAGE: Literal["image"] = "image"
GROUP: Literal["group"] = "group"
OUTER: Literal["outer"] = "outer"
SEVERAL: Literal["several"] = "several"


def rising(span: tuple[float, float] | None) -> tuple[float, float] | None:
    if span is not None and not span[0] < span[1]:
        raise ValueError(f"{list(span)} is not a range: give the value of black and a larger one of white")
    return span


Range = Annotated[tuple[FiniteFloat, FiniteFloat] | None, AfterValidator(rising)]


class Groups(Strict):
    """Where the id of each image's person is found, one way of these. Ids are never written."""

    csv: str | None = None  # a table with the columns file (the path below data.path) and group (the id)
    pattern: str | None = None  # a regular expression for file names; its one group is the id
    folder: bool | Literal["outer"] = False  # pictures lie in <class>/<id>/; outer: in <id>/<class>/
    array: bool = False  # groups.npy in the folder, or `groups` in the archive: one id per image, in their order
    dicom: bool = False  # the PatientID of each DICOM file
    column: str | None = None  # of the table metadata.*, the key in a sample's .json (webdataset), an array of the .npz
    # owner's confirmation: the most images that one person has; an id with far more than others have is refused
    largest: Positive | None = None
    # owner's confirmation: an image without an id is its person's only image; otherwise such images are refused
    alone: bool = False

    @model_validator(mode="after")
    def one_way(self) -> Self:
        ways = ("csv", "pattern", "folder", "array", "dicom", "column")
        number = sum(bool(getattr(self, way)) for way in ways)
        if number != 1:
            raise ValueError(f"it names {number} ways to find ids: give one of {', '.join(ways)}")
        return self

    @property
    def words(self) -> str:
        """Where ids of persons are found."""
        (way, value), *_ = self.model_dump(exclude_defaults=True).items()
        folder = "a folder each, with those of classes inside" if value == OUTER else "a folder each, in each class"
        ways = {"folder": folder, "array": "`groups` beside the images", "dicom": "DICOM's PatientID"}
        alone = ", and each image without one for itself" if self.alone else ""
        return ways.get(way, f"{way} {value}") + alone

    @field_validator("pattern")
    @classmethod
    def finds_one_id(cls, value: str | None) -> str | None:
        try:
            groups = 1 if value is None else re.compile(value).groups
        except re.error as error:
            raise ValueError(f"it is not a regular expression ({error})") from error
        if groups != 1:
            raise ValueError(f"it has {groups} groups in parentheses: expected one, around the id, as in '^(P\\d+)_'")
        return value


class Data(Strict):
    """Where the sensitive images come from. Every value in this section is public."""

    # name that the odometer counts by, at most 64 of A-Z a-z 0-9 . _ -; None: the source's name. Required for files of
    # your own
    dataset_id: DatasetId | None = None
    source: str = "digits"  # one of SOURCES (sfumato/settings/sources)
    # folder or file; required for files of your own. Also a zip of it, or Parquet with pictures inside
    path: str | None = None
    # after resizing: the side of squares, or [rows, columns]; None: as in the source
    size: Size | None = None
    channels: Literal[1, 3] | None = None  # 1 grey, 3 colour; None: as in the source
    # values shown as black and white, for files with more than 8 bits (16 bits, DICOM after its rescale, such as
    # Hounsfield units); required for them
    range: Range = None
    fit: Literal["crop", "pad"] = "crop"  # of images in other proportions: their middle, or black bars
    # names by label, for files that hold no list of them: MedMNIST, webdataset, and tables (label_column); with several
    # labels, the columns to take
    classes: tuple[ClassName, ...] | None = None
    # where labels are: of imagefolder, a column of metadata.csv, .jsonl or .parquet (by file_name), instead of folders;
    # of webdataset, a key of each .json, instead of .cls. With several labels, the column that lists them: "a|b"
    label_column: str | None = None
    # of imagefolder, a column of metadata.*, such as sex or site, by which `evaluate` compares accuracies; local
    compare_by: str | None = None
    # labels of an image: one, or any number of them at once, as findings: a table, or a 0/1 matrix in an archive
    labels: Literal["one", "several"] = "one"
    # share of the pictures, such as 1%, that may be broken or no pictures at all: those are left out and listed in the
    # state directory; more are refused
    skip: Part = 0.0
    # public name of this state of the images; a new one makes every query run, and spend, again. None: a random one,
    # drawn at the first preparation and kept
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    holdout_fraction: Fraction = 0.2  # share of the images kept for evaluation; ignored if the source has a test split
    # owner's confirmation: these images show different people from those already counted under another id
    different_people: bool = False
    groups: Groups | None = None  # which images are of one person, for privacy.unit: group; of the owner's own sources
    # owner's confirmation: images that were already charged are regrouped. The odometer is then incomplete
    other_groups: bool = False

    @field_validator("classes")
    @classmethod
    def are_distinct(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and len({*value}) < len(value):
            raise ValueError("two classes have one name: give each its own")
        return value

    @model_validator(mode="after")
    def fits_the_source(self) -> Self:
        for setting in OWNERS:
            takers = [name for name, kind in SOURCES.items() if setting in kind.takes]
            given = getattr(self, setting) != type(self).model_fields[setting].default
            if given and self.source not in takers:
                raise ValueError(f"data.{setting} is of {' and '.join(takers)}, not of {self.source}")
        if self.groups is not None and self.labels == SEVERAL and self.groups.folder:
            raise ValueError("data.groups: with several labels, ids are found by column, csv, pattern, array or dicom")
        tabled = self.label_column is not None or self.source == "webdataset"
        if self.groups is not None and tabled and (self.groups.folder or self.groups.array):
            raise ValueError("data.groups: with labels in a table, ids are found by column, pattern, csv or dicom")
        return self

    @property
    def name(self) -> str:
        """The id that the odometer counts by. An image folder or an archive must be given one."""
        if self.dataset_id is None and self.source in OF_THE_OWNER:
            raise ConfigError("data.dataset_id is missing: name these images once and for ever, such as clinic-2026")
        return self.dataset_id or self.source


class Public(Strict):
    """Labelled public images: free to use, and without any guarantee of their own.

    They are prepared if a stage in `run` reads them.
    """

    source: str = "glyphs"  # one of SOURCES (sfumato/settings/sources)
    path: str | None = None  # folder or file; required for files of your own
    per_class: Positive = 300  # images of each class, for sources that are drawn
    # owner's confirmation: images of your own without privacy.json were not made from sensitive ones
    declared_public: bool = False
