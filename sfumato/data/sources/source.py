"""Types and functions for all sources of images: the request, the result, and the conversion of an
image.
"""

import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from sfumato.data.decoding import PictureFile, PictureForm, fit
from sfumato.errors import ConfigError, DataError, is_failure, public
from sfumato.settings.data import Groups, Volume

# An image, (H, W, C) uint8, and its label: a number or, if images have several labels, (classes,)
# uint8 of 0 and 1
Example = tuple[np.ndarray, int | np.ndarray]


@dataclass(frozen=True)
class ListedBlock:
    """The entries `first` to `stop` − 1 of a class folder, counted from 0 in the order of names."""

    folder: str
    first: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A part of a source that is converted independently of the other parts.

    path: a file or its URL; for a block, the folder of the whole set;
    state: values that change if the content changes; None if a change cannot be detected.
    """

    path: str
    held_out: bool = False
    block: ListedBlock | None = None
    state: tuple[str | int, ...] | None = None


class LeftOut(NamedTuple):
    """A picture or another file that is left out, and the reason."""

    file: PictureFile
    reason: str


@dataclass(frozen=True)
class Source:
    """A source of labelled images.

    `train` and `test` can be iterated only once. `test` is None if the source has no test split, or
    if none was requested.

    groups, files, labels: id of the person (or None), file and label of each image, in the order of
    `train` and then `test`. Only sources that read the owner's files can have these;
    held_out: number of images in `test`;
    converted: number of images by kind of conversion. Private;
    left_out: pictures and other files that are left out. The key of a picture is its index in
    `files`, and the key of another file is the file itself. Private.
    """

    classes: tuple[str, ...]
    train: Iterable[Example]
    test: Iterable[Example] | None
    size: int  # number of all images, for a progress bar; private for sensitive images
    groups: list[str | None] | None = None
    files: Sequence[PictureFile] = ()  # private, because their names may be ids
    labels: Iterable[int | np.ndarray] = ()
    # Value of each image in the column `data.compare_by`, in the order of `files`; private
    compared: Sequence[str] = ()
    held_out: int = 0
    converted: Counter[str] = field(default_factory=Counter)
    left_out: dict[object, LeftOut] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [file.name for file in self.files]


class Place(NamedTuple):
    """A picture, its label, and its person's id, if a table contains the id."""

    file: PictureFile
    label: Any  # a number or, for several labels, (classes,) uint8 of 0 and 1
    person: str = ""
    held_out: bool = False


@dataclass(frozen=True)
class Listing:
    """The content of a source before decoding: its pictures, and problems with other files.

    The pictures of the hold-out come last.
    """

    classes: tuple[str, ...]
    places: list[Place]
    official: bool = False  # whether there is a test split
    problems: list[DataError] = field(default_factory=list)

    @property
    def train(self) -> list[Place]:
        return [place for place in self.places if not place.held_out]


class Form(TypedDict, total=False):
    """Keys of a `Request` that describe the layout of a source."""

    name: str
    classes: tuple[str, ...] | None
    label_column: str | None
    several: bool


@dataclass(frozen=True, kw_only=True)
class Request(PictureForm):
    """A user's request for images from a source.

    `section`: "data" for sensitive images, "public" for public images.
    """

    section: str
    name: str
    path: str | None
    per_class: int = 0  # number of images per class, for sources that the program draws
    seed: int = 0  # random seed, for sources that the program draws
    groups: Groups | None = None  # rule for finding ids of sensitive images
    volume: Volume | None = None  # slices of volumes and series that become images
    classes: tuple[str, ...] | None = None  # in the order of labels, for files without class names
    label_column: str | None = None  # column of a table, or key of samples, with the labels
    # Column of the table, such as sex; the evaluation reports the accuracy for each of its values
    compare_by: str | None = None
    several: bool = False  # whether an image has any number of labels, instead of exactly one
    mixed: bool = False  # whether images may differ in size and channels
    skip: float = 0.0  # share of the pictures that may be broken
    left_out: dict[object, LeftOut] = field(default_factory=dict)
    # The part of the source to read; None: all. Ids are checked when all parts have been read
    shard: Shard | None = None

    @property
    def sensitive(self) -> bool:
        """Return whether the set is sensitive. Such a set keeps its test split and may have ids."""
        return self.section == "data"

    @property
    def id_column(self) -> str | None:
        if self.groups is None:
            return None
        return self.groups.column

    def required_path(self) -> Path:
        if self.path is None:
            raise public(
                ConfigError(
                    f"{self.section}.path is missing: set it to the path of the files, because "
                    f"{self.section}.source={self.name} reads files."
                )
            )
        return Path(self.path).expanduser()


def examples(
    images: Iterable[np.ndarray], labels: Iterable, request: Request, name: str
) -> Iterator[Example]:
    """Convert images, (H, W) or (H, W, C) uint8, one by one as requested.

    Yields them with their labels.
    """
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        converted = fit(np.atleast_3d(image), request, f"{name}, image {i}")
        yield converted, label.astype(np.uint8) if request.several else int(label)


def download(name: str, raw: Path, fix: str, *, test: bool, **options: Any) -> tuple:
    """Let torchvision fetch and verify the dataset `name` in the folder `raw`.

    Returns a tuple of the training set and, with `test`, the test set.
    """
    from torchvision import datasets  # slow import, only when needed

    default_timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(60.0)  # seconds to wait for an answer
    try:
        splits = (True, False) if test else (True,)
        return tuple(
            getattr(datasets, name)(raw, train=train, **{"download": True, **options})
            for train in splits
        )
    except (OSError, RuntimeError) as error:  # no network, a broken file, a full disk
        if options.get("download") is False and is_failure(error):
            raise
        for folder in (raw / name / "raw", raw / name):
            with suppress(OSError):  # rmdir removes empty folders only
                folder.rmdir()
        raise DataError(
            f"{raw} does not contain all files of {name}, and they could not be downloaded "
            f"({error}). {fix}."
        ) from error
    finally:
        socket.setdefaulttimeout(default_timeout)
