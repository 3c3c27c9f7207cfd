"""What an owner's images look like, from which `stage init` proposes a project: layout, sizes, persons.

All of it is private, except for what its owner decides to publish.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data.images import GROUPS, per_class
from sfumato.data.prepare import progress
from sfumato.data.sources import open_source, tabled
from sfumato.data.sources.deep import Span, is_dicom
from sfumato.data.sources.imagefolder import parts_of, visible
from sfumato.data.sources.npz import archive_layout
from sfumato.data.sources.source import Example, Request
from sfumato.data.sources.tabled import LABEL, TABLES, TEST, TRAIN
from sfumato.data.tables import BETWEEN, columns_of, read_table, table_in
from sfumato.errors import ConfigError, DataError, PrivateError, reading_sensitive
from sfumato.settings.data import SEVERAL, Groups

PERSON = r"^([A-Za-z]+-?\d+)_\d+\."  # in the name of a picture: a person's id, then a number of the picture
# columns that hold the ids of persons
PERSONS = {"group", "person", "person_id", "patient", "patient_id", "patientid", "subject", "subject_id", "participant"}
FOLDERS: dict[str, Any] = {"name": "imagefolder"}  # the layout of class folders
Layout = tuple[dict[str, Any], Groups | None]  # keys of the Request, and where the ids of persons are


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The size and form of a set of sensitive images. Private, except for what its owner decides to publish.

    images, held_out: how many; side: the median of the shorter sides; colour: most pictures have some; groups: where
    the ids of persons are found; persons: how many of them are not held out; counts: pictures of each class that are
    not held out; named: the pattern that finds persons if all names look like p0123_2.png; data: keys of the section
    `data` that say where the labels are.
    """

    classes: tuple[str, ...]
    images: int
    held_out: int | None
    side: int
    colour: bool
    groups: Groups | None
    persons: int | None
    counts: tuple[int, ...]
    named: str | None
    data: dict[str, Any]


def survey(path: Path, groups: Groups | None = None, span: Span | None = None, label: str | None = None) -> Survey:
    """Look at every picture of a folder, of tar files or of an archive, whose sizes and channels may differ.

    groups: None for those of the layout; label: the column of a table, None for that of the layout.
    Raises RangeMissing if a picture has more than 8 bits and there is no `span`; else DataError that names every file
    that cannot be used; with groups, by its place.
    """
    reading_sensitive()
    form, shown = layout_of(path, label)
    request = Request(section="data", path=str(path), groups=groups or shown, range=span, mixed=True, **form)
    source = open_source(request, path)

    def look(images: Iterable[Example]) -> list[tuple[Any, int, bool]]:
        return [(label, min(image.shape[:2]), bool((image != image[..., :1]).any())) for image, label in images]

    train, test = look(progress(source.train, source.size, "looking")), look(source.test or ())
    if not train + test:
        raise DataError(f"{path} has {len(source.classes)} classes and no pictures: give some of each.")
    if source.test is not None and not test:
        raise DataError(f"{path} has no pictures in its hold-out: add some, or remove {TEST}/ for one drawn by a key.")
    labels, sides, coloured = zip(*train, *test, strict=True)
    ids = None if source.groups is None else source.groups[: len(train)]
    found = [match and match[1] for match in (re.match(PERSON, name) for name in source.names)]
    data: dict[str, Any] = {} if form == FOLDERS else {"source": request.name}
    data |= {"classes": [*source.classes]} if data and (request.name != "npz" or request.classes) else {}
    data |= {"labels": SEVERAL} if request.several else {}
    data |= {"label_column": request.label_column} if request.label_column is not None else {}
    return Survey(
        classes=source.classes,
        images=len(train),
        held_out=None if source.test is None else len(test),
        side=int(np.median(sides)),
        colour=2 * sum(coloured) > len(coloured),
        groups=request.groups,
        persons=None if ids is None else len({*ids} - {None}) + ids.count(None),
        counts=tuple(per_class(np.array(labels[: len(train)]), len(source.classes)).tolist()),
        named=PERSON if None not in found and 1 < len({*found}) < len(found) else None,
        data=data,
    )


def layout_of(path: Path, label: str | None) -> Layout:
    """How `path` looks: the keys of a Request that say where labels are, and where persons' ids are, if it shows.

    label: the column that the owner names. Class folders win over a table but labels.csv, unless a column is named.
    Raises ConfigError for a column of persons' ids, and if a table does not tell which column holds the labels.
    """
    if label is not None and label.lower() in PERSONS:
        what = f"--label-column={label} looks like persons' ids, which would be published as names of classes"
        raise ConfigError(f"{what}: name the column of the labels, or rename this one")
    if path.suffix == ".npz":
        return archive_layout(path)
    folders = {entry.name for entry in visible(path) if entry.is_dir()} if path.is_dir() else set()
    by_folder = label is None and len(folders) > 1
    table = tabled.table_of(path)
    if table and (not by_folder or table.name == TABLES[0]) and (several := several_in(table, label)):
        return several
    table = table_in(path) or table_in(path / TRAIN)
    if path.is_file() or (table is None and [*path.glob("*.tar")]):
        return {"name": "webdataset", "label_column": label}, groups_in(tabled.keys_of(path))
    if label is None and (table is None or (by_folder and folders != {TRAIN, TEST})):
        return FOLDERS, groups_shown(path)
    heads = columns_of(table) if table else []
    groups = groups_in(heads)
    left = [name for name in heads if groups is None or name != groups.column]
    label = label or (LABEL if LABEL in heads else left[0] if len(left) == 1 else None)
    if label is None:
        raise ConfigError(f"{table} has the columns {', '.join(heads)}: name that of the labels by --label-column")
    return FOLDERS | {"label_column": label}, groups


def several_in(table: Path, label: str | None) -> Layout | None:
    """The layout of a folder whose table gives its pictures several labels each; None if it does not.

    Two columns of 0 and 1 at least; or one whose cells list labels, such as "effusion|mass". label: that column, if the
    owner names it. The names follow from the images where they are listed: only an owner may make them public.
    """
    cells, groups = dict[str, list[str]](), groups_in(columns_of(table))
    for name in columns_of(table):
        with suppress(PrivateError):  # of a column that is of no use here, such as an age
            if groups is None or name != groups.column:
                cells[name] = [cell for _, (cell,) in read_table(table, [name], str(table))]
    binary = tuple(name for name, own in cells.items() if {*own} <= {*tabled.VALUES})
    if label is None and len(binary) > 1 and LABEL not in cells:
        return FOLDERS | {"several": True, "classes": binary}, groups
    listing = [name for name, own in cells.items() if label in (None, name) and any(BETWEEN in cell for cell in own)]
    if len(listing) != 1:
        return None
    names = tabled.classes_in([part for cell in cells[listing[0]] for part in tabled.labels_listed(cell)])
    return FOLDERS | {"several": True, "classes": names, "label_column": listing[0]}, groups


def groups_in(heads: Iterable[str]) -> Groups | None:
    """The column that holds persons' ids, by its name."""
    return next((Groups(column=name) for name in heads if name.lower() in PERSONS), None)


def groups_shown(path: Path) -> Groups | None:
    """The groups of a folder as it shows them: `groups.npy`, DICOM's patients, a folder for each person; or None."""
    if (path / GROUPS).exists():
        return Groups(array=True)
    parts = parts_of(path) if path.is_dir() else []
    classes = [entry for part in parts for entry in visible(part) if entry.is_dir()]
    inner = [entry for folder in classes for entry in visible(folder)]
    if inner and all(entry.is_file() and is_dicom(entry) for entry in inner):
        return Groups(dicom=True)
    nested = inner and all(entry.is_dir() and not entry.is_symlink() for entry in inner)
    return Groups(folder=True) if nested else None
