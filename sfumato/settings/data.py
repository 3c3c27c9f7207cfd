"""The sections `data` and `public`: where images come from."""

import re
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    field_validator,
    model_validator,
)

from sfumato.errors import ConfigError, nearest
from sfumato.settings.fields import Fraction, Part, Positive, Size, Strict, composed
from sfumato.settings.sources import OF_THE_OWNER, OWNERS, SOURCES, sources_of
from sfumato.storage.documents import class_name, dataset_name

DatasetId = Annotated[str, AfterValidator(dataset_name)]
ClassName = Annotated[str, AfterValidator(class_name)]
# Units of protection: one image with its labels, or all images of one person
IMAGE: Literal["image"] = "image"
GROUP: Literal["group"] = "group"
OUTER: Literal["outer"] = "outer"
SEVERAL: Literal["several"] = "several"


def is_url(path: str | None) -> bool:
    return path is not None and "://" in path


def source_in(section: str) -> AfterValidator:
    """Return a validator that accepts only the sources that can be chosen in a section."""

    def check_source(name: str) -> str:
        if name not in (sources := sources_of(section)):
            raise ValueError(nearest(name, sources))
        return name

    return AfterValidator(check_source)


def without_secrets(path: str | None) -> str | None:
    """Return the path. Raise ValueError for a URL with @, ? or ::.

    With @ or ?, a URL may contain credentials, and settings are committed to git. With ::, copies
    of the files may be stored where others can read them.
    """
    if path is not None and is_url(path):
        if "::" in path:
            raise ValueError(
                "reading a URL with :: may leave copies of the files where others can read them: "
                "give one URL without ::"
            )
        if "@" in path or "?" in path:
            raise ValueError(
                "a URL with @ or ? may contain a password or key, and settings are shared: "
                "leave that part out, and set the credentials as environment variables"
            )
    return path


def rising(span: tuple[float, float] | None) -> tuple[float, float] | None:
    if span is not None and not span[0] < span[1]:
        raise ValueError(
            f"{list(span)} is not a range: expected the value of black, then a larger value of "
            "white"
        )
    return span


Range = Annotated[tuple[FiniteFloat, FiniteFloat] | None, AfterValidator(rising)]


class Groups(Strict):
    """Rule for finding the id of the person in each image. Exactly one of csv, pattern, folder,
    array, dicom, volume and column must be set.

    The ids themselves are never stored.
    """

    # Path of a table with two columns: `file`, a path below data.path, and `group`, the person's id
    csv: str | None = None
    # Regular expression for file names, with one pair of parentheses, around the id
    pattern: str | None = None
    # Use a folder name as the id: true if pictures are in <class>/<id>/, outer if they are in
    # <id>/<class>/
    folder: bool | Literal["outer"] = False
    # Read one id per image, in the order of the images, from groups.npy in the folder or from the
    # array `groups` in the .npz archive
    array: bool = False
    dicom: bool = False  # Use the PatientID of each DICOM file
    # Treat each NIfTI volume as one person with all its slices. A person with several volumes is
    # then not protected as a whole
    volume: bool = False
    # Name of the column of metadata.*, of the key in each .json (webdataset), or of the array
    # (.npz) that contains the ids
    column: str | None = None
    # Owner's confirmation that one person may have up to this many images. The limit per id is this
    # number (None: 30), or 10 times the 90th percentile of the numbers of images per id, if that is
    # more
    largest: Positive | None = None
    # Owner's confirmation that each image without an id is its person's only image. Otherwise, such
    # images are refused
    alone: bool = False

    @model_validator(mode="after")
    def one_way(self) -> Self:
        ways = ("csv", "pattern", "folder", "array", "dicom", "volume", "column")
        number = sum(bool(getattr(self, way)) for way in ways)
        if number != 1:
            raise ValueError(
                f"{number} ways to find ids are set: expected exactly one of {', '.join(ways)}"
            )
        return self

    @property
    def words(self) -> str:
        """Description of the place where ids of persons are found."""
        (way, value), *_ = self.model_dump(exclude_defaults=True).items()
        folder = "folders <person>/<class>/" if value == OUTER else "folders <class>/<person>/"
        ways = {
            "folder": folder,
            "array": "groups.npy or, for an .npz archive, its array `groups`",
            "dicom": "DICOM's PatientID",
            "volume": (
                "volume. Each volume counts as one person, so a person with several volumes is not "
                "protected as a whole"
            ),
        }
        suffix = "; each image without an id counts as one person" if self.alone else ""
        return ways.get(way, f"{way} {value}") + suffix

    @field_validator("pattern")
    @classmethod
    def finds_one_id(cls, value: str | None) -> str | None:
        try:
            groups = 1 if value is None else re.compile(value).groups
        except re.error as error:
            raise ValueError(f"not a regular expression ({error})") from error
        if groups != 1:
            raise ValueError(
                f"the pattern has {groups} capturing groups: expected one pair of parentheses, "
                "around the id, as in '^(P\\d+)_'"
            )
        return value


class Volume(Strict):
    """Selection of the slices that become images. It applies to NIfTI volumes, DICOM series, and
    DICOM files with several frames.
    """

    model_config = ConfigDict(serialize_by_alias=True, populate_by_name=True)

    # Direction in which NIfTI volumes are sliced, after they are turned to a common orientation;
    # None: axial. The slices of DICOM series stay as they were acquired
    axis: Literal["axial", "coronal", "sagittal"] | None = None
    first: int = Field(default=0, ge=0, alias="from")  # First slice of each volume, counted from 0
    last: int | None = Field(default=None, ge=0, alias="to")  # Last slice; None: the volume's last
    step: Positive = 1  # Distance between slices: 2 takes every second one
    # BIDS suffix of the volumes to use, such as T1w; None: the only suffix in the folder
    suffix: Annotated[str, Field(pattern=r"^[A-Za-z0-9]+$")] | None = None

    @property
    def selection(self) -> slice:
        """The slices of a volume, as a Python slice."""
        stop = None
        if self.last is not None:
            stop = self.last + 1
        return slice(self.first, stop, self.step)


class Data(Strict):
    """The sensitive images and how they are read. Every value in this section is public."""

    # Name under which the odometer counts all charges on these images: at most 64 letters (A-Z,
    # a-z), digits, dots, underscores and hyphens. Required for your own files, and if `path` is
    # set; None: the name of the source
    dataset_id: DatasetId | None = None
    # Kind of source: one of SOURCES (sfumato/settings/sources)
    source: Annotated[str, source_in("data")] = "digits"
    # Folder or file with the images, a zip file of that folder, a Parquet file with embedded
    # pictures, or the URL of tar or Parquet files, such as s3://scans/{0000..0999}.tar. Required if
    # the images are your own files
    path: Annotated[str | None, AfterValidator(without_secrets)] = None
    # Stored size in pixels: the side of a square, or [rows, columns]; None: as in the source
    size: Size | None = None
    # Number of channels: 1 grey, 3 colour; None: as in the source
    channels: Literal[1, 3] | None = None
    # Pixel values to show as black and as white. Required for files with more than 8 bits per
    # value: 16-bit pictures and DICOM files. DICOM values are first rescaled to units such as
    # Hounsfield units
    range: Range = None
    # Slices of NIfTI volumes or DICOM series that become images. Requires `groups`, because all
    # slices of a volume belong to one person
    volume: Volume | None = None
    # Treatment of images whose proportions differ from `size`: crop to the middle, or pad with
    # black bars
    fit: Literal["crop", "pad"] = "crop"
    # Class names, in the order of the labels; None: the names in the files. Required for MedMNIST
    # and webdataset, and with `label_column` or `groups: {folder: outer}`. If `labels` is `several`
    # and the table has one column per label, these are the names of the columns
    classes: tuple[ClassName, ...] | None = None
    # Name of the label's column in metadata.csv, .jsonl or .parquet (imagefolder), or of the
    # label's key in each .json (webdataset); None: the label is the name of the folder or, for
    # webdataset, the content of the .cls or, without a .cls, the value of `label` in the .json. If
    # `labels` is `several`, the column lists all labels of an image, as in "a|b"
    label_column: str | None = None
    # Column of metadata.* (imagefolder), such as sex or site; `evaluate` reports the accuracy for
    # each of its values. These numbers are local
    compare_by: str | None = None
    # Labels per image: `one`, or `several` for any number of labels, such as the findings in an
    # X-ray. Several labels are read from a table, or from a 0/1 matrix in an archive
    labels: Literal["one", "several"] = "one"
    # Largest allowed share of broken files and files that contain no picture, such as 1%. These
    # files are left out, and listed in the state directory. If there are more, preparation stops
    skip: Part = 0.0
    # Public name of this version of the images. If it changes, every query runs and spends again;
    # None: a random name, which is chosen at the first preparation and then kept
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    # Share of the images (with `groups`, share of the persons) in the hold-out; ignored if the
    # source has a test split
    holdout_fraction: Fraction = 0.2
    # Owner's confirmation that these images show no person whose images are already counted under
    # another dataset_id
    different_people: bool = False
    # Rule for finding each image's person, for privacy.unit: group. Applies only to your own files
    groups: Groups | None = None
    # Owner's confirmation that images may now be assigned to other persons than before, although
    # queries have already used these images. The odometer is then permanently incomplete
    other_groups: bool = False

    @field_validator("classes")
    @classmethod
    def are_distinct(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        names = value and tuple(map(composed, value))
        if names and len({*names}) < len(names):
            raise ValueError("two classes have the same name: rename one")
        return names

    @model_validator(mode="after")
    def fits_the_source(self) -> Self:
        for setting in OWNERS:
            takers = [name for name, kind in SOURCES.items() if setting in kind.takes]
            given = getattr(self, setting) != type(self).model_fields[setting].default
            if given and self.source not in takers:
                raise ValueError(
                    f"data.{setting} applies only to data.source {', '.join(takers)}, not to "
                    f"{self.source}: remove data.{setting}"
                )
        if self.volume is not None and self.groups is None:
            raise ValueError(
                "data.volume requires data.groups, because all slices of a volume belong to one "
                "person. Set data.groups to {dicom: true} for DICOM, or to {volume: true} if no "
                "person has two volumes"
            )
        if self.groups is not None and self.labels == SEVERAL and self.groups.folder:
            raise ValueError(
                "data.groups.folder cannot be used if data.labels is `several`: use "
                "data.groups.column, csv, pattern, array or dicom"
            )
        tabled = self.label_column is not None or self.source == "webdataset"
        if self.groups is not None and tabled and (self.groups.folder or self.groups.array):
            way = "folder" if self.groups.folder else "array"
            cause = "data.source is webdataset"
            if self.label_column is not None:
                cause = "data.label_column is set"
            raise ValueError(
                f"data.groups.{way} cannot be used if {cause}: use data.groups.column, pattern, "
                "csv or dicom"
            )
        return self

    @property
    def name(self) -> str:
        """Return the id under which the odometer counts these images.

        Raises ConfigError if `dataset_id` is missing, and the images are the owner's files or come
        from `path`.
        """
        if self.dataset_id is None and self.source in OF_THE_OWNER:
            raise ConfigError(
                "data.dataset_id is missing: choose a permanent name for these images, such as "
                "clinic-2026"
            )
        if self.dataset_id is None and self.path is not None:
            raise ConfigError(
                "data.dataset_id is missing, but data.path is set: choose a permanent name for "
                f"these images. Choose {self.source} if they are the public set {self.source}, or "
                "if they were prepared before without a dataset_id: earlier charges then still "
                "count"
            )
        return self.dataset_id or self.source


class Public(Strict):
    """Labelled public images. Using them costs no privacy, and the guarantee does not cover them.

    They are prepared if a stage in `run` reads them.
    """

    # Kind of source: one of SOURCES (sfumato/settings/sources)
    source: Annotated[str, source_in("public")] = "glyphs"
    path: str | None = None  # Folder or file with the images; required for your own files
    per_class: Positive = 300  # Images per class, for sources that the program draws itself
    # Owner's confirmation that the images in `path` were not made from sensitive images. Not needed
    # for an earlier release: the privacy.json beside its images lists its charges
    declared_public: bool = False
