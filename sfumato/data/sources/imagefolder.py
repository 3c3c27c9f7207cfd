"""Read pictures whose labels are in the names of class folders, in a table or in tar files.

Class folders may be in `train/` and `test/`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path

from PIL.Image import registered_extensions

from sfumato.data.decoding import PictureFile, decode, decoded
from sfumato.data.deep import is_dicom
from sfumato.data.formats import AnotherFormat, link_format, sentences
from sfumato.data.groups import ids_of_files, persons_of
from sfumato.data.images import GROUPS, GROUPS_REFUSED
from sfumato.data.series import check_series, in_slices, with_own_ids
from sfumato.data.sources.bids import PARTICIPANT, PARTICIPANTS, is_bids
from sfumato.data.sources.source import (
    Example,
    LeftOut,
    ListedBlock,
    Listing,
    Place,
    Request,
    Source,
)
from sfumato.data.sources.splits import TRAIN, folders_in, split_of, visible, visible_names
from sfumato.data.sources.tabled import (
    column_of,
    is_picture,
    list_labels,
    list_metadata,
    list_shards,
)
from sfumato.data.tables import FILE, METADATA, TABLES
from sfumato.data.volumes import is_volume
from sfumato.errors import ConfigError, DataError
from sfumato.settings.data import OUTER, Groups
from sfumato.settings.fields import composed


def read_imagefolder(request: Request, raw: Path) -> Source:
    """Read pictures whose labels are in the names of class folders, in a table or in tar files.

    Class folders and their pictures are sorted by name. Hidden files are ignored. Folders with the
    names of parts, such as train, are treated as parts (see `split_of`). If labels are in a table
    or in tar files, `encode_labels` or, with several labels, `list_labels` determines the classes.

    If files cannot be used, raises DataError that lists all of them. The error is raised in this
    call, or later, while the pictures are decoded.
    """
    path = request.required_path()
    groups = request.groups
    listing = list_pictures(request)
    if not request.sensitive:
        listing = replace(listing, places=listing.train, official=False)
    elif groups is None and path.is_dir() and (path / GROUPS).exists():
        raise DataError(f"{path / GROUPS} {GROUPS_REFUSED}.")
    if listing.problems:
        raise refusal([*listing.problems, *problems_of(listing.places, request)])
    all_places = places = listing.places
    if request.skip:
        places = without_strays(all_places, request)
    files = [place.file for place in places]
    persons = [place.person for place in places]
    ids: list[str | None] | None = None
    if groups is not None and request.shard is not None:
        ids = [*persons_of(groups, files, persons)]
    elif groups is not None:
        ids = ids_of_files(groups, files, path, persons)
        check_series(files, ids)
        ids = with_own_ids(files, ids, path, sliced=request.volume is not None)
    compared: list[str] = []
    if request.compare_by is not None:
        compared = column_of(path, request.compare_by, files, request.volume)
    if request.volume is not None:
        pictures = [*in_slices(files, request.volume, request.converted)]
        numbers = [number for number, _ in pictures]
        places = all_places = [places[number]._replace(file=file) for number, file in pictures]
        ids = ids and [ids[number] for number in numbers]
        compared = compared and [compared[number] for number in numbers]
        files = [place.file for place in places]
    train_size = sum(not place.held_out for place in places)
    shapes: list[tuple[int, ...]] = []  # shape of the first picture, which both parts must have
    train = pictures_of(places[:train_size], all_places, request, shapes)
    test = None
    if listing.official:
        test = pictures_of(places[train_size:], all_places, request, shapes, train_size)
    labels = [place.label for place in places]
    return Source(
        listing.classes,
        train,
        test,
        len(files),
        ids,
        files,
        labels,
        compared,
        len(files) - train_size,
    )


def list_pictures(request: Request) -> Listing:
    """List the pictures of a request without decoding them.

    The labels are in folder names, in a table or in tar files. Raises ConfigError if the settings
    do not fit a BIDS folder.
    """
    if request.several:
        return list_labels(request)
    if request.name == "webdataset":
        return list_shards(request)
    # In BIDS, labels are in the participants' table, and each participant is a person
    if is_bids(request.required_path()) and (
        request.label_column is None or request.volume is None or request.id_column != PARTICIPANT
    ):
        raise ConfigError(
            f"{request.path} is laid out as BIDS, so each subject is a person: set "
            f"data.label_column to a column of {PARTICIPANTS}, set data.volume, for example to "
            f"{{axis: axial}}, and set data.groups: {{column: {PARTICIPANT}}}"
        )
    if request.label_column is not None:
        return list_metadata(request, request.label_column)
    block = None
    if request.shard is not None:
        block = request.shard.block
    return list_folder(
        request.required_path(), f"{request.section}.path", request.groups, request.classes, block
    )


def list_folder(
    path: Path,
    option: str = "data.path",
    groups: Groups | None = None,
    class_names: Sequence[str] | None = None,
    block: ListedBlock | None = None,
) -> Listing:
    """List the pictures of a folder, or of a part of it (`block`), by class and split.

    option: name of the setting that contains the path, for messages;
    class_names: names of the classes, used only if `groups.folder` is OUTER. Each outer folder then
    belongs to a person, and contains class folders.

    Raises DataError if there are no classes.
    """
    if not path.is_dir():
        raise DataError(
            f"{option}={path} is not a folder: expected one folder of pictures per class."
        )
    train, test = split_of(path)
    official = bool(test)
    classes = sorted({composed(folder.name) for part in train for folder in folders_in(part)})
    # Each person's folder contains class folders. It is treated like a part, such as train/
    if groups is not None and groups.folder == OUTER:
        train, test = (
            [person for folder in part for person in folders_in(folder)] for part in (train, test)
        )
        classes = [*(class_names or ())]
    parts = train + test
    items = [
        item
        for part in parts
        for item in list_part(part, path, classes, groups, part in test, block)
    ]
    places = [item for item in items if isinstance(item, Place)]
    problems = [item for item in items if isinstance(item, DataError)]
    files = [place.file for place in places if isinstance(place.file, Path)]
    entries = [*dict.fromkeys(file.parent for file in files)]
    if any(map(Path.is_symlink, files)):
        entries += files
    first_entries: dict[Path, Path] = {}
    for entry in entries:
        if (first_entry := first_entries.setdefault(entry.resolve(), entry)) != entry:
            problems.append(
                DataError(
                    f"{entry} and {first_entry} are the same file or folder, because of a link, so "
                    "each of its pictures would count twice: remove the link."
                )
            )
    if not classes:
        message = (
            f"{option}={path} contains no pictures: expected one folder of pictures per class, or "
            "a table of labels."
        )
        if problems:
            message = (
                f"{option}={path} contains pictures, but no class folder: move each picture into a "
                f"folder named after its class, or write {METADATA[0]} with the columns {FILE} and "
                "label."
            )
        if (path / TABLES[0]).is_file():
            message += f" If the labels are in {TABLES[0]}, set data.labels: several."
        raise DataError(message)
    if groups is not None and groups.column is not None and not problems:
        persons = column_of(path, groups.column, files)
        places = [
            place._replace(person=person) for place, person in zip(places, persons, strict=True)
        ]
    return Listing(tuple(classes), places, official, problems)


def list_part(
    path: Path,
    root: Path,
    classes: Sequence[str],
    groups: Groups | None,
    held_out: bool,
    block: ListedBlock | None,
) -> Iterator[Place | DataError]:
    """Yield the pictures of one part of the folder `root`, by class, and an error for each entry
    that cannot be used.
    """
    nested = groups is not None and groups.folder is True
    # DICOM files contain the person's id, so they may be in folders below the class folder
    deep = groups is not None and groups.dicom
    for folder in visible(path):
        if not folder.is_dir():
            if is_picture(folder):
                yield DataError(
                    f"{folder} is not in a class folder: move it into a folder named after its "
                    "class."
                )
            continue
        if error := misplaced(folder, root) or unknown_class(folder, root, classes, groups):
            yield error
            continue
        if block is not None and block.folder != str(folder):
            continue
        # A folder without pictures is still a class. If it were refused, the error would reveal
        # that its last picture was removed.
        entries = visible_names(folder)
        if block is not None:
            entries = entries[block.first : block.stop]
        inner = (entries_of(folder / entry, nested, deep) for entry in entries)
        for picture in chain.from_iterable(inner):
            if picture.is_dir():
                fix = "move its pictures directly into the class folder"
                if groups is None:
                    fix += ". If the folder belongs to one person, set data.groups: {folder: true}"
                yield DataError(f"{picture} is a folder inside a class folder: {fix}.")
            else:
                yield misplaced(picture, root) or Place(
                    picture, classes.index(composed(folder.name)), held_out=held_out
                )


def unknown_class(
    folder: Path, root: Path, classes: Sequence[str], groups: Groups | None
) -> DataError | None:
    """Return an error if a folder is not named after one of the classes."""
    if composed(folder.name) in classes:
        return None
    class_source: object = root / TRAIN
    if groups is not None and groups.folder == OUTER:
        class_source = "data.classes"
    return DataError(
        f"{folder} is a class folder, but {class_source} does not contain this class: add the "
        f"class to {class_source}, or remove the folder."
    )


def entries_of(entry: Path, nested: bool, deep: bool) -> Iterable[Path]:
    """List the pictures that an entry of a class folder stands for.

    If `nested`, a folder stands for its entries. If `deep`, a folder stands for all files below it,
    unless the folder is a link. Any other entry stands for itself. The list may still contain
    folders, which the caller refuses.
    """
    if not (nested or deep) or not entry.is_dir() or (deep and entry.is_symlink()):
        return [entry]
    if nested:
        return visible(entry)
    return chain.from_iterable(entries_of(child, nested, deep) for child in visible(entry))


def misplaced(entry: Path, root: Path) -> DataError | None:
    """Return the error for an entry below the folder `root` that is neither a file nor a folder, or
    that is a link out of `root`. Returns None for any other entry.
    """
    leads_out = entry.is_symlink() and not entry.resolve().is_relative_to(root.resolve())
    exists = entry.is_file() or entry.is_dir()
    if exists and not leads_out:
        return None
    if form := link_format(entry):
        return AnotherFormat(str(entry), form)
    if leads_out:
        message = (
            f"{entry} is a link to {entry.resolve()}, outside of {root}: replace the link by a "
            "copy of its target."
        )
    else:
        message = f"{entry} is not a file (a pipe, a device, or a link to nothing): remove it."
    return DataError(message)


def pictures_of(
    files: list[Place],
    all_places: list[Place],
    request: Request,
    shapes: list[tuple[int, ...]],
    offset: int = 0,
) -> Iterator[Example]:
    """Yield the pictures of `files`, decoded one by one, with their labels.

    all_places: all pictures of the source, including `files`;
    shapes: list that receives the shape of the first picture; all pictures must have this shape;
    offset: number of pictures of `all_places` that come before `files`.

    A picture that cannot be read is left out. The whole source is refused with DataError in three
    cases: the pictures left out exceed the share `request.skip`, an intact picture is in an
    unsupported format, or size or channels differ without `request.mixed`. The error lists all
    pictures of `all_places` with a problem. Guarantee: if the source is not refused, whether a
    picture is left out depends only on that picture.
    """
    with closing(decoded([place.file for place in files], request)) as images:
        for number, image in enumerate(images):
            if isinstance(image, DataError):
                leave_out(offset + number, files[number].file, image, all_places, request)
                continue
            shapes[:] = shapes or [image.shape]
            if image.shape != shapes[0] and not request.mixed:
                raise refusal(problems_of(all_places, request))
            yield image, files[number].label


def leave_out(
    key: object, file: PictureFile, error: DataError, all_places: list[Place], request: Request
) -> None:
    """Record in `Source.left_out`, under `key`, that a picture is left out because of `error`.

    Raises DataError that lists all unusable pictures of `all_places` if more pictures are left out
    than the request allows, or if this picture is intact but in an unsupported format.
    """
    request.left_out[key] = LeftOut(file, str(error))
    if isinstance(error, AnotherFormat) or len(request.left_out) / len(all_places) > request.skip:
        raise refusal(problems_of(all_places, request)) from None


def without_strays(places: list[Place], request: Request) -> list[Place]:
    """Leave out the files that are pictures neither by name nor by content.

    Otherwise such a file would count as an image, and need a person's id and a row in a table. With
    `data.volume`, a damaged volume or DICOM file is kept, because its error is raised when its
    slices are decoded.
    """
    for file, *_ in places:
        if (
            isinstance(file, Path)
            and file.suffix.lower() not in registered_extensions()
            and (request.volume is None or not (is_volume(file) or is_dicom(file)))
        ):
            try:
                decode(file, request.range or (0, 1))
            except DataError as error:
                leave_out(file, file, error, places, request)
    return [place for place in places if place.file not in request.left_out]


def problems_of(files: Sequence[Place], request: Request) -> list[DataError]:
    """Return one error per file that cannot be used, and one error for all files whose size or
    channels differ.
    """
    problems: list[DataError] = []
    shapes: dict[PictureFile, tuple[int, ...]] = {}
    paths = [place.file for place in files]
    for path, image in zip(paths, decoded(paths, request), strict=True):
        if isinstance(image, DataError):
            problems.append(image)
        else:
            shapes[path] = image.shape
    first, *others = shapes or [Path()]
    if mismatches := [
        path for path in others if shapes[path] != shapes[first] and not request.mixed
    ]:
        parts = {"size": slice(2), "channels": slice(2, 3)}
        properties = [
            name
            for name, part in parts.items()
            if len({shape[part] for shape in shapes.values()}) > 1
        ]
        options = " and ".join(f"{request.section}.{name}" for name in properties)
        more = ""
        if len(mismatches) > 1:
            more = f" ({len(mismatches) - 1} more picture(s) differ from {first})"
        differing = f"{mismatches[0]} is {shape_text(shapes[mismatches[0]])}"
        expected = f"{first} is {shape_text(shapes[first])}"
        problems.append(
            DataError(
                f"{differing}, but {expected}{more}: set {options} to give all pictures the same "
                "size and number of channels."
            )
        )
    return problems


def refusal(problems: Sequence[DataError]) -> DataError:
    """Return one error that lists the problems. After 200 lines, further lines are only counted.

    If there are no problems, the error states that pictures changed while they were read.
    """
    if not problems:
        return DataError(
            "pictures changed while they were read: leave the folder unchanged, and run the "
            "command again."
        )
    # State each problem once, because all slices of a damaged volume have the same problem
    problems = [*{str(problem): problem for problem in problems}.values()]
    lines = sentences(problems)
    if len(lines) == 1:
        return DataError(lines[0])
    more = [f"and {len(lines) - 200} more."] if len(lines) > 200 else []
    return DataError("\n".join([f"{len(problems)} files cannot be used:", *lines[:200], *more]))


def shape_text(shape: tuple[int, ...]) -> str:
    return f"{shape[0]}×{shape[1]} {'grey' if shape[2] == 1 else 'colour'}"
