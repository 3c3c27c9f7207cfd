"""What every source of images shares: the request, the result, and how an image is made to fit."""

import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sfumato.data.decoding import Member, fit
from sfumato.errors import ConfigError, DataError, is_failure, public
from sfumato.settings.data import Groups

Example = tuple[np.ndarray, int | np.ndarray]  # (H, W, C) uint8 and its label, or its (classes,) uint8 of 0 and 1


@dataclass(frozen=True)
class Source:
    """A labelled source. `train` and `test` are read once; `test` is None without an official or a requested split.

    groups: the id of each image's person, or None, in the order of `train` and then `test`; files: theirs;
    labels: theirs, of which the last `held_out` are of `test`. Only the owner's own sources have these.
    converted, left_out: what reading them did to how many, and why a picture, by its place in that order, or another
    file is left out. Private.
    """

    classes: tuple[str, ...]
    train: Iterable[Example]
    test: Iterable[Example] | None
    size: int  # images in all, for a progress bar; private for sensitive images
    groups: list[str | None] | None = None
    files: Sequence[Path | Member] = ()  # private: their names may be ids
    labels: Iterable[int | np.ndarray] = ()
    compared: Sequence[str] = ()  # private: the cells of `data.compare_by`, in the order of groups
    held_out: int = 0
    converted: Counter[str] = field(default_factory=Counter)
    left_out: dict[Any, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [file.name for file in self.files]


class Place(NamedTuple):
    """A picture, its label, and the id of its person where a table gives one."""

    file: Path | Member
    label: Any  # a number, or of several (classes,) uint8 of 0 and 1
    person: str = ""
    held_out: bool = False


@dataclass(frozen=True)
class Listing:
    """What a source holds, before any picture is decoded: pictures, those held out last, and problems of the rest."""

    classes: tuple[str, ...]
    places: list[Place]
    official: bool = False  # there is a test split
    problems: list[DataError] = field(default_factory=list)

    @property
    def train(self) -> list[Place]:
        return [place for place in self.places if not place.held_out]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asks of a source. `section`: "data" for sensitive images, "public" for public ones."""

    section: str
    name: str
    path: str | None
    size: tuple[int, int] | None = None  # height and width; None: as the source has them
    channels: int | None = None  # None: as the source has them
    per_class: int = 0  # images of each class, of the sources that are drawn
    seed: int = 0  # of what is drawn
    groups: Groups | None = None  # where ids are found, of sensitive images
    range: tuple[float, float] | None = None  # values of black and white, of files with more than 8 bits
    pad: bool = False  # images in other proportions get black bars; otherwise their middle is taken
    classes: tuple[str, ...] | None = None  # names by label, for files without names
    label_column: str | None = None  # of a table, or of samples
    compare_by: str | None = None  # a column of the table
    several: bool = False  # an image has any number of labels
    mixed: bool = False  # images may differ in size and channels
    skip: float = 0.0  # share of the pictures that may be broken
    converted: Counter[str] = field(default_factory=Counter)
    left_out: dict[Any, str] = field(default_factory=dict)

    @property
    def sensitive(self) -> bool:
        """Sensitive sets bring their test split and may have groups; public ones need neither."""
        return self.section == "data"

    @property
    def id_column(self) -> str | None:
        return None if self.groups is None else self.groups.column

    def required_path(self) -> Path:
        if self.path is None:
            raise public(ConfigError(f"{self.section}.path is missing: {self.section}.source={self.name} needs it."))
        return Path(self.path).expanduser()


def examples(images: Iterable[np.ndarray], labels: Iterable, request: Request, name: str) -> Iterator[Example]:
    """Images one by one, (H, W) or (H, W, C) uint8, converted as `request` asks, with their labels."""
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        converted = fit(np.atleast_3d(image), request, f"{name}, image {i}")
        yield converted, label.astype(np.uint8) if request.several else int(label)


def download(name: str, raw: Path, fix: str, *, test: bool, **options: Any) -> tuple:
    """Let torchvision fetch and verify dataset `name` under `raw`. Returns (training set,); with `test`, both sets."""
    from torchvision import datasets  # heavy: only when used

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(60.0)  # seconds without an answer
    try:
        splits = (True, False) if test else (True,)
        return tuple(getattr(datasets, name)(raw, train=train, **{"download": True, **options}) for train in splits)
    except (OSError, RuntimeError) as error:  # no network, a broken file, a full disk
        if options.get("download") is False and is_failure(error):
            raise
        for empty in (raw / name / "raw", raw / name):
            with suppress(OSError):  # rmdir removes empty folders only
                empty.rmdir()
        raise DataError(
            f"{raw} does not contain a complete {name}, and it could not be downloaded ({error}). {fix}."
        ) from error
    finally:
        socket.setdefaulttimeout(before)
