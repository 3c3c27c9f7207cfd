"""Survey an owner's images (layout, sizes, persons), so that `stage init` can propose a project.

All results are private, except for those that the owner decides to publish.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sfumato.data.companions import Companions, companions_in
from sfumato.data.decoding import Member, PictureFile, with_progress
from sfumato.data.images import per_class
from sfumato.data.labels_and_ids import FOLDERS, Unclear, check_found, columns_of
from sfumato.data.layout import check_persons_beside, layout_of, volume_in
from sfumato.data.names import Repeats, repeated_folders, repeats_in
from sfumato.data.photographs import taken_in_a_row
from sfumato.data.prepare import statuses
from sfumato.data.repeated_ids import are_coarser, repeated_ids
from sfumato.data.series import LOCALIZERS, burned_in, dicom_header
from sfumato.data.sources import Source, check_there, open_source
from sfumato.data.sources.packed import naming_archives
from sfumato.data.sources.source import Request
from sfumato.data.sources.splits import TEST
from sfumato.data.volumes import Slice, is_volume
from sfumato.errors import UNREADABLE, DataError, reading_sensitive
from sfumato.settings.data import SEVERAL, Groups
from sfumato.settings.options import ALL, InitOptions
from sfumato.storage.digest import digest_of
from sfumato.storage.documents import read_json
from sfumato.storage.files import replace_private

CACHE = "survey_cache.json"  # file in the state directory with the results of the last survey


class PictureFacts(NamedTuple):
    """Facts from pictures and their headers.

    side, longer: medians of the shorter and of the longer sides, in pixels;
    proportion: median of height divided by width. If 1 is between the quartiles of this ratio, as
    in a mixture of portrait and landscape formats, the value is 1 instead;
    colour: whether most pictures are in colour;
    in_a_row: the result of `taken_in_a_row`;
    burned_in: number of DICOM files whose header states that text is burned into the pixels.
    """

    side: int
    longer: int
    proportion: float
    colour: bool
    in_a_row: bool
    burned_in: int


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The size and form of a set of sensitive images.

    All fields are private, except for what the owner decides to publish.

    images: number of images without the hold-out;
    held_out: number of images in the hold-out, None if there is none;
    facts: facts from the pictures and their headers;
    groups: rule for finding persons' ids;
    persons: number of persons, without the hold-out; None if no rule finds them;
    counts: number of pictures of each class, without the hold-out;
    largest: at most three ids with the most images, each with its number of images, without the
    hold-out;
    repeats: why several images may show one person, if no ids are known;
    companions: pictures that accompany others, such as masks;
    volumes: whether images are slices of NIfTI volumes;
    localizers: number of DICOM files that were left out because they are localizers;
    data: keys of the section `data` that describe the layout and the labels.
    """

    classes: tuple[str, ...]
    images: int
    held_out: int | None
    facts: PictureFacts
    groups: Groups | None
    persons: int | None
    counts: tuple[int, ...]
    largest: tuple[tuple[str, int], ...]
    repeats: Repeats | None
    companions: Companions | None
    volumes: bool
    localizers: int
    data: dict[str, object]


@naming_archives()
def survey(options: InitOptions, state: Path | None = None) -> Survey:
    """Survey every picture of a folder, of tar files or of an archive.

    Sizes and channels may differ.

    options: the owner's options. The layout decides which persons' ids, labels and volumes to use,
    unless an option states them; state: state directory that caches the results for the next call.

    Raises Unclear, before any picture is decoded, if only the owner can decide how to find the
    labels, classes or persons. Raises DataError if a picture has more than 8 bits and there is no
    `range`. If files cannot be used, raises DataError that lists all of them.
    """
    options = replace(options, alone=options.alone or options.one_image_each)
    path = options.images
    check_there(str(path), options.groups)
    reading_sensitive()
    form, groups = layout_of(options)
    if groups is None and not options.alone:
        check_persons_beside(path)
    groups = groups and groups.model_copy(update={"alone": groups.alone or options.alone})
    request = Request(
        section="data",
        path=str(path),
        mixed=True,
        groups=groups,
        range=options.range,
        skip=options.skip,
        volume=options.volume or volume_in(path),
        **form,
    )
    source = open_source(request, path)
    if options.groups is None and request.id_column is not None:
        check_headers(source, request.id_column)
    labels = np.array([*source.labels], int)
    counts = per_class(labels, len(source.classes)).tolist()
    train_size = source.size - source.held_out
    if options.classes is None:
        check_found(form, source.classes, counts)
    elif options.classes != ALL and {*options.classes} != {*source.classes}:
        text = (
            "{option.classes}={names}, but {path} contains a different set of classes: name "
            "exactly the classes that it contains"
        )
        raise Unclear(text, option="classes", names=",".join(options.classes), path=path)
    if not source.size:
        raise DataError(
            f"{path} has {len(source.classes)} classes and no pictures: add pictures of each class."
        )
    if source.test is not None and not source.held_out:
        raise DataError(
            f"{path} has no pictures in its hold-out: add pictures, or remove {TEST}/, so that a "
            "hold-out is drawn from the other pictures."
        )
    facts = picture_facts(source, request, state)
    files = {
        whole_file(file): label for file, label in zip(source.files, source.labels, strict=True)
    }
    ids = None if source.groups is None else source.groups[:train_size]
    return Survey(
        classes=source.classes,
        images=train_size,
        held_out=None if source.test is None else source.held_out,
        facts=facts,
        groups=groups,
        persons=None if ids is None else len({*ids} - {None}) + ids.count(None),
        counts=tuple(per_class(labels[:train_size], len(source.classes)).tolist()),
        largest=tuple(Counter(person for person in ids or () if person is not None).most_common(3)),
        repeats=repeats_of(files, source, path, request.label_column, facts.in_a_row),
        companions=companions_in(
            [file.name for file in files], [str(file.parent) for file in files]
        ),
        volumes=any(isinstance(file, Slice) and file.axis is not None for file in source.files),
        localizers=source.converted[LOCALIZERS],
        data=section_of(request, source.classes, form != FOLDERS),
    )


def check_headers(source: Source, column: str) -> None:
    """Raise Unclear if one PatientID of DICOM files belongs to several ids in a column.

    column: name of the column with the ids in `source`.
    """
    files = [*map(whole_file, source.files)]
    headers = {file: dicom_header(file) for file in {*files}}
    patients = [getattr(headers[file], "patient", "") for file in files]
    if are_coarser(patients, source.groups or ()):
        raise Unclear(
            "one PatientID in the DICOM files belongs to several ids in the column {column}, so "
            "these may not be ids of persons. If they are, give {option.groups} {column}. "
            "Otherwise, remove this column from the table, so that each PatientID is a person",
            option="groups",
            column=column,
        )


def section_of(request: Request, classes: Sequence[str], other_layout: bool) -> dict[str, object]:
    """Return the keys of the section `data` for a request.

    other_layout: whether the layout is different from class folders.
    """
    data = {
        "source": other_layout and request.name,
        "classes": other_layout and (request.name != "npz" or request.classes) and [*classes],
        "labels": request.several and SEVERAL,
        "label_column": request.label_column,
        "range": request.range and [*request.range],
        "volume": volume_setting(request),
        "skip": request.skip,
    }
    return {key: value for key, value in data.items() if value}


def volume_setting(request: Request) -> dict[str, object] | None:
    """Return the setting `data.volume` of a request."""
    if request.volume is None:
        return None
    return request.volume.model_dump(exclude_none=True)


def whole_file(file: PictureFile) -> Path | Member:
    """Return the volume or DICOM file that contains a slice, and any other picture unchanged."""
    if isinstance(file, Slice):
        return file.path
    return file


def picture_facts(source: Source, request: Request, state: Path | None) -> PictureFacts:
    """Return the facts from the pictures and their headers.

    If no file and no option has changed since the last survey, its results are read from the cache
    in `state`. Raises the errors of decoding.
    """
    identity = [
        str(request.path),
        (request.range, request.skip, volume_setting(request)),
        source.size,
        [
            (name, s.st_size, s.st_ino, s.st_ctime_ns)
            for name, s in statuses(request.required_path())
        ],
    ]
    key = digest_of(identity)
    if state is not None:
        with suppress(*UNREADABLE):
            return PictureFacts(**read_json(state / CACHE)[key])
    sides = []
    coloured = 0
    for image, _ in with_progress(chain(source.train, source.test or ()), source.size, "surveying"):
        sides.append(image.shape[:2])
        coloured += bool((image != image[..., :1]).any())
    shorter, longer = np.median(np.sort(sides), axis=0)
    low, middle, high = np.quantile(np.divide(*np.transpose(sides)), (0.25, 0.5, 0.75))
    if (low - 1) * (high - 1) <= 0:
        middle = 1.0
    files = [*dict.fromkeys(map(whole_file, source.files))]
    pictures = [file for file in files if isinstance(file, Member) or not is_volume(file)]
    facts = PictureFacts(
        side=int(shorter),
        longer=int(longer),
        proportion=float(middle),
        colour=2 * coloured > len(sides),
        in_a_row=taken_in_a_row(pictures),
        burned_in=burned_in(files),
    )
    if state is not None:
        with suppress(OSError):
            replace_private(state / CACHE, json.dumps({key: facts._asdict()}).encode())
    return facts


def repeats_of(
    files: Mapping[Path | Member, object],
    source: Source,
    path: Path,
    label: str | None,
    in_a_row: bool,
) -> Repeats | None:
    """Find a reason why several images may show one person.

    Names of files, a column of ids, folders and photographs taken in a row are checked, in this
    order. Returns None if there is no reason, or if the persons are known.

    files: label of each file; label: column of the labels.
    """
    if source.groups is not None:
        return None
    labels = [np.asarray(value).tobytes() for value in files.values()]
    folders = [str(file.parent) for file in files]
    repeats = repeats_in([file.name for file in files], folders, labels, source.classes)
    column = repeated_ids(columns_of(path), label)
    if column and (repeats is None or repeats.groups is None):
        name, proposed = column
        return Repeats(
            why=f"Ids in a column repeat ({name}), as if one person had several images",
            groups=name if proposed else None,
        )
    if repeats is None and repeated_folders(folders, labels):
        return Repeats(
            why="Each folder contains several images, as if each folder belonged to one person"
        )
    if repeats is None and in_a_row:
        return Repeats(
            why=(
                "Photographs were taken within seconds of each other, or in a row by one device, "
                "as if they showed one person"
            )
        )
    return repeats
