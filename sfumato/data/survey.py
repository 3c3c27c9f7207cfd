"""Survey an owner's images (layout, sizes, persons), so that `stage init` can propose a project.

All results are private, except for those that the owner decides to publish.
"""

import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data.companions import Companions, companions_in
from sfumato.data.deep import Span
from sfumato.data.images import per_class
from sfumato.data.layout import ALL, FOLDERS, check_found, layout_of, repeated_ids
from sfumato.data.names import Repeats, repeated_folders, repeats_in
from sfumato.data.photographs import taken_in_a_row
from sfumato.data.prepare import progress, statuses
from sfumato.data.sources import Source, check_there, open_source
from sfumato.data.sources.source import Request
from sfumato.data.sources.splits import TEST
from sfumato.errors import UNREADABLE, ConfigError, DataError, reading_sensitive
from sfumato.settings.data import SEVERAL, Groups
from sfumato.settings.options import Classes
from sfumato.storage.digest import digest_of
from sfumato.storage.documents import read_json
from sfumato.storage.files import replace_private

LOOKED = "looked.json"  # in the state directory: what the last folder's pictures looked like


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The size and form of a set of sensitive images. Private, except for what its owner decides to publish.

    images, held_out: how many; side, longer: the medians of the shorter and of the longer sides; proportion: the median
    of rows over columns, 1 if a quarter of the pictures lie otherwise than most; colour: most pictures have some;
    groups: where the ids of persons are found; persons: how many of them are not held out; counts: pictures of each
    class that are not held out; largest: the ids with most images, and how many; repeats: why several images may be of
    one person, if nothing says whose they are; companions: pictures that accompany others, as masks do; data: keys of
    the section `data` that say where the labels are.
    """

    classes: tuple[str, ...]
    images: int
    held_out: int | None
    side: int
    longer: int
    proportion: float
    colour: bool
    groups: Groups | None
    persons: int | None
    counts: tuple[int, ...]
    largest: tuple[tuple[str, int], ...]
    repeats: Repeats | None
    companions: Companions | None
    data: dict[str, Any]


def survey(
    path: Path,
    groups: Groups | None = None,
    span: Span | None = None,
    label: str | None = None,
    classes: Classes | None = None,
    alone: bool = False,
    skip: float = 0.0,
    state: Path | None = None,
) -> Survey:
    """Look at every picture of a folder, of tar files or of an archive, whose sizes and channels may differ.

    groups: None for those of the layout; label: the column of a table, None for that of the layout;
    classes: as the owner names them, ALL for those found; alone: images without an id are their persons' only ones;
    skip: the share of the pictures that may be broken; state: where the looking is kept for the next call.
    Raises Unclear for what only the owner can decide, before any picture is decoded; DataError if a picture has more
    than 8 bits and there is no `span`, or that names every file that cannot be used.
    """
    check_there(str(path), groups)
    reading_sensitive()
    form, groups = layout_of(path, label, groups, classes)
    groups = groups and groups.model_copy(update={"alone": groups.alone or alone})
    request = Request(section="data", path=str(path), groups=groups, range=span, mixed=True, skip=skip, **form)
    source = open_source(request, path)
    labels = np.array([*source.labels], int)
    counts = per_class(labels, len(source.classes)).tolist()
    trained = source.size - source.held_out
    if classes is None:
        check_found(form, source.classes, counts)
    elif classes != ALL and {*classes} != {*source.classes}:
        text = "{option.classes}={names}, but {path} contains others: name all of its classes"
        raise ConfigError(text, option="classes", names=",".join(classes), path=path)
    check_not_empty(source, path)
    form_and_colour = looked(source, path, (span, skip), state)
    ids = None if source.groups is None else source.groups[:trained]
    other = form != FOLDERS
    data = {
        "source": other and request.name,
        "classes": other and (request.name != "npz" or request.classes) and [*source.classes],
        "labels": request.several and SEVERAL,
        "label_column": request.label_column,
        "range": span and [*span],
        "skip": skip,
    }
    return Survey(
        classes=source.classes,
        images=trained,
        held_out=None if source.test is None else source.held_out,
        groups=groups,
        persons=None if ids is None else len({*ids} - {None}) + ids.count(None),
        counts=tuple(per_class(labels[:trained], len(source.classes)).tolist()),
        largest=tuple(Counter(one for one in ids or () if one is not None).most_common(3)),
        repeats=repeats_of(source, path, request.label_column, form_and_colour.pop("in_a_row")),
        companions=companions_in(source.names, [str(file.parent) for file in source.files]),
        data={key: value for key, value in data.items() if value},
        **form_and_colour,
    )


def check_not_empty(source: Source, path: Path) -> None:
    """Raise DataError if there are no pictures, or none in a hold-out that the folder brings."""
    if not source.size:
        raise DataError(f"{path} has {len(source.classes)} classes and no pictures: add pictures of each class.")
    if source.test is not None and not source.held_out:
        raise DataError(
            f"{path} has no pictures in its hold-out: add some, or remove {TEST}/ to have a hold-out drawn."
        )


def looked(source: Source, path: Path, asked: tuple[Span | None, float], state: Path | None) -> dict[str, Any]:
    """`side`, `longer`, `proportion` and `colour` of a survey, and whether photographs were taken `in_a_row`.

    They are as kept in `state`, if nothing changed. asked: what else decides whether they can be decoded. Raises as the
    decoding of `source` does.
    """
    about = [str(path), asked, source.size, [(name, s.st_size, s.st_ino, s.st_ctime_ns) for name, s in statuses(path)]]
    key = digest_of(about)
    if state is not None:
        with suppress(*UNREADABLE):
            seen = read_json(state / LOOKED)[key]
            return {name: seen[name] for name in ("side", "longer", "proportion", "colour", "in_a_row")}
    sides = []
    coloured = 0
    for image, _ in progress(chain(source.train, source.test or ()), source.size, "looking"):
        sides.append(image.shape[:2])
        coloured += bool((image != image[..., :1]).any())
    shorter, longer = np.median(np.sort(sides), axis=0)
    low, middle, high = np.quantile(np.divide(*np.transpose(sides)), (0.25, 0.5, 0.75))
    if (low - 1) * (high - 1) <= 0:
        middle = 1.0
    colour = 2 * coloured > len(sides)
    seen = {"side": int(shorter), "longer": int(longer), "proportion": float(middle), "colour": colour}
    seen["in_a_row"] = taken_in_a_row(source.files)
    if state is not None:
        with suppress(OSError):
            replace_private(state / LOOKED, json.dumps({key: seen}).encode())
    return seen


def repeats_of(source: Source, path: Path, label: str | None, in_a_row: bool) -> Repeats | None:
    """Why several images of a source may be of one person, by names, a column, folders or photographs.

    label: the column of the labels. None where persons are known.
    """
    if source.groups is not None:
        return None
    labels = [np.asarray(one).tobytes() for one in source.labels]
    folders = [str(file.parent) for file in source.files]
    found = None
    if source.files:
        found = repeats_in([file.name for file in source.files], folders, labels, source.classes)
    column = repeated_ids(path, label)
    if column and (found is None or found.groups is None):
        return Repeats(why="Ids in a column repeat, as if one person had several images", groups=column)
    if found is None and repeated_folders(folders, labels):
        return Repeats(why="Each folder contains several images, as if each folder belonged to one person")
    if found is None and in_a_row:
        return Repeats(
            why="Photographs were taken within seconds, or in a row by one device, as if they showed one person"
        )
    return found
