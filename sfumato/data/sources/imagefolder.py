"""Pictures: a folder with one folder per class, or `train/` and `test/`, each laid out so; or as `tabled` has them."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data.groups import Ids, checked, ids_of_files, place_of
from sfumato.data.images import GROUPS, GROUPS_REFUSED, per_class
from sfumato.data.sources.deep import RangeMissing, Span, decode_dicom, is_dicom, shown
from sfumato.data.sources.source import Example, Listing, Member, Place, Request, Source, fit
from sfumato.data.sources.tabled import (
    PERSONS,
    TABLES,
    TEST,
    TRAIN,
    layout_of,
    list_tabled,
    pictures_below,
    required_classes,
    several_in,
)
from sfumato.errors import ConfigError, DataError, PrivateError, explained
from sfumato.settings.data import SEVERAL, Groups
from sfumato.storage.documents import class_name

LEFT_BY_SYSTEMS = {"thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx"}  # in any case; hidden files are ignored too
PERSON = r"^([A-Za-z]+-?\d+)_\d+\."  # in the name of a picture: a person's id, then a number of the picture
NAMED = 200  # bad files that one refusal names at most
# Formats of plain pictures. Left out are those that hold programs, such as PostScript, which other programs would run.
FORMATS = "AVIF BMP DIB GIF ICO JPEG JPEG2000 PCX PNG PPM QOI SGI TGA TIFF WEBP"


def read_imagefolder(request: Request, raw: Path) -> Source:
    """A folder with one folder of pictures per class, in the order of their names; hidden files are ignored.

    If a folder holds only `train/` and `test/`, `test/` is the hold-out. With labels in a table, or in tar files, the
    classes are those of `request`; with several labels, `labels_of_table` names them. Raises DataError, here or while
    the pictures are decoded, that names every file that cannot be used; with groups, by its place: names may be ids.
    """
    path, groups = request.required_path(), request.groups
    if request.sensitive and path.is_dir() and (path / GROUPS).exists() and groups is None:
        raise DataError(f"{path / GROUPS} {GROUPS_REFUSED}.")
    if request.tabled:
        required_classes(request.classes)
    tabled = request.tabled or request.several
    found = list_tabled(request) if tabled else list_folder(path, f"{request.section}.path", groups)
    if not request.sensitive:
        found = replace(found, test=None)
    if found.problems:
        raise refusal([*found.problems, *problems_of(found.files, request)])
    ids = None if groups is None else ids_of(groups, found, path)
    if ids is not None and {*ids[: len(found.train)]} & {*ids[len(found.train) :]} - {None}:
        raise PrivateError(
            f"data.groups: somebody has pictures in both {TRAIN} and {TEST} of {path}, and no guarantee covers the "
            "hold-out: move all pictures of a person into one of them"
        )
    shapes: list[tuple[int, ...]] = []  # of the first picture, for both parts
    train = pictures_of(found.train, found.files, request, shapes)
    test = None if found.test is None else pictures_of(found.test, found.files, request, shapes)
    return Source(found.classes, train, test, len(found.files), ids)


def ids_of(groups: Groups, found: Listing, path: Path) -> Ids:
    """The id of each picture, by a table's column or as `ids_of_files` has it."""
    if groups.column is not None:
        if found.ids is None:
            raise ConfigError(f"data.groups.column={groups.column} needs labels in a table too, and {path} has folders")
        return checked(found.ids, groups)
    return ids_of_files(groups, [file for file, _ in found.files], path)  # type: ignore[misc]


def list_folder(path: Path, option: str = "data.path", groups: Groups | None = None) -> Listing:
    """The pictures of a folder by class and split. Raises DataError if it has no class."""
    if not path.is_dir():
        raise DataError(f"{option}={path} is not a folder: expected one folder of pictures per class.")
    train, *more = [list_classes(part, path, groups) for part in parts_of(path)]
    test = more[0] if more else None
    if not train.classes:
        hint = " For labels.csv, set data.labels: several." if (path / TABLES[0]).is_file() else ""
        raise DataError(f"{option}={path} holds no folder of a class: expected one folder of pictures per class.{hint}")
    with explained(DataError, lambda error: f"{option}={path}: {error}. Rename its folder."):
        for name in (*train.classes, *(test.classes if test else ())):
            class_name(name)
    if test is None:
        return train
    problems = [
        f"{path / TEST / name} is a class that {path / TRAIN} does not have: add it there, or remove it."
        for name in sorted({*test.classes} - {*train.classes})
    ]
    labels = {i: train.classes.index(name) for i, name in enumerate(test.classes) if name in train.classes}
    held_out = [(file, labels[label]) for file, label in test.train if label in labels]
    return Listing(train.classes, train.train, held_out, [*train.problems, *test.problems, *problems])


@dataclass(frozen=True)
class Survey:
    """The size and form of a folder of sensitive images. Private, except for what its owner decides to publish.

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
    groups: Groups | None = None
    persons: int | None = None
    counts: tuple[int, ...] = ()
    named: str | None = None
    data: dict[str, Any] = field(default_factory=dict)


def survey(
    path: Path,
    progress: Callable[[Sequence], Iterable] = iter,
    groups: Groups | None = None,
    span: Span | None = None,
    label: str | None = None,
) -> Survey:
    """Look at every picture of a folder, or of tar files, whose sizes and channels may differ.

    groups: None for those of the layout; label: the column of a table, None for that of the layout.
    Raises RangeMissing if a picture has more than 8 bits and there is no `span`; else DataError that names every file
    that cannot be used; with groups, by its place.
    """
    if label is not None and label.lower() in PERSONS:
        what = f"--label-column={label} looks like persons' ids, which would be published as names of classes"
        raise ConfigError(f"{what}: name the column of the labels, or rename this one")
    classes, label, person = several_in(path, label) or (None, label, None)
    several, source = classes is not None, "imagefolder"
    if not several:
        source, label, person = layout_of(path, label)
    tabled = several or label is not None or source == "webdataset"
    groups = groups or (person and Groups(column=person)) or (None if tabled else groups_shown(path))
    form: dict[str, Any] = {"range": span, "label_column": label, "several": several, "classes": classes}
    request = Request(section="data", name=source, path=str(path), groups=groups, **form)
    found = list_tabled(request) if tabled else list_folder(path, "FOLDER", groups)
    problems, sides, coloured = list(found.problems), [], 0
    for number, (file, label_) in enumerate(progress(found.files), 1):
        try:
            image = decode(file, span=span)
        except RangeMissing:
            raise
        except DataError:
            problems += problems_of([(file, label_)], request, number)
            continue
        sides.append(min(image.shape[:2]))
        coloured += image.shape[2] == 3 and bool((image != image[..., :1]).any())
    if problems:
        raise refusal(problems)
    if len(found.classes) < 2 or not sides:
        has = f"{len(found.classes)} class(es) and {len(sides)} pictures"
        raise DataError(f"{path} has {has}: give two or more of each.")
    held_out = None if found.test is None else len(found.test)
    if held_out == 0:
        raise DataError(f"{path} has no pictures in its hold-out: add some, or remove {TEST}/ for one drawn by a key.")
    ids = [] if groups is None else ids_of(groups, found, path)[: len(found.train)]
    persons = None if groups is None else len({*ids} - {None}) + ids.count(None)
    side, colour = int(np.median(sides)), 2 * coloured > len(sides)
    counts = tuple(per_class(np.array([label for _, label in found.train]), len(found.classes)).tolist())
    names = [re.match(PERSON, file.name) for file, _ in found.files]
    seen = {match[1] for match in names if match}
    named = PERSON if all(names) and 1 < len(seen) < len(names) else None
    data = {"source": source, "classes": list(found.classes)} if tabled else {}
    data |= {"labels": SEVERAL} if several else {}
    data |= {"label_column": label} if label is not None else {}
    return Survey(found.classes, len(found.train), held_out, side, colour, groups, persons, counts, named, data)


def groups_shown(path: Path) -> Groups | None:
    """The groups of a folder as it shows them: `groups.npy`, DICOM's patients, a folder for each person; or None."""
    if (path / GROUPS).exists():
        return Groups(array=True)
    parts = parts_of(path) if path.is_dir() else []
    classes = [entry for part in parts for entry in visible(part) if entry.is_dir()]
    inner = [entry for folder in classes for entry in visible(folder)]
    if inner and all(entry.is_file() and is_dicom(entry) for entry in inner):
        return Groups(dicom=True)
    if not inner or not all(entry.is_dir() and not entry.is_symlink() for entry in inner):
        return None
    return Groups(folder=True)


def parts_of(path: Path) -> list[Path]:
    """`train/` and `test/` of a folder that holds no other folders, and in them folders, no pictures; else itself."""
    folders = {entry.name: entry for entry in visible(path) if entry.is_dir()}
    inner = (any(entry.is_dir() for entry in visible(folder)) for folder in folders.values())
    return [path / TRAIN, path / TEST] if {*folders} == {TRAIN, TEST} and all(inner) else [path]


def list_classes(path: Path, root: Path, groups: Groups | None = None) -> Listing:
    """The classes of one part of the folder `root`."""
    from PIL.Image import registered_extensions

    entries, nested = visible(path), groups is not None and groups.folder
    folders = [entry for entry in entries if entry.is_dir()]
    problems = [
        f"{entry if groups is None else f'A picture in {path}'} lies outside a class: "
        "move it into a folder named after its class."
        for entry in entries
        if not entry.is_dir() and entry.suffix.lower() in registered_extensions()
    ]
    files: list[Place] = []
    for label, folder in enumerate(folders):
        if wrong := misplaced(folder, root, str(folder)):
            problems.append(wrong)
            continue
        # A folder without pictures is a class all the same: a refusal would reveal that its last picture is gone.
        for picture in pictures_in(folder, nested):
            name = str(picture) if groups is None else f"An entry of {folder}"
            if picture.is_dir():
                fix = "pictures must lie directly in their class's folder"
                fix += ", or, if it is one person's, set data.groups: {folder: true}" if groups is None else ""
                problems.append(f"{name} is a folder inside a class: {fix}.")
            elif wrong := misplaced(picture, root, name):
                problems.append(wrong)
            else:
                files.append((picture, label))
    return Listing(tuple(folder.name for folder in folders), files, None, problems)


def misplaced(entry: Path, root: Path, name: str) -> str | None:
    """Why an entry of the folder `root` is refused: not a file, or a link out of `root`. name: for the message."""
    if entry.is_symlink() and not entry.resolve().is_relative_to(root.resolve()):
        target = entry.resolve() if name == str(entry) else "a file"
        return f"{name} is a link to {target}, outside of {root}: copy what it links to in its place."
    if not entry.is_file() and not entry.is_dir():
        return f"{name} is not a file (a pipe, a device, or a link to nothing): remove it."
    return None


def pictures_in(folder: Path, nested: bool) -> list[Path]:
    """The entries of a class's folder; nested: those of its folders instead of the folders."""
    inner = (visible(entry) if nested and entry.is_dir() else [entry] for entry in visible(folder))
    return [entry for entries in inner for entry in entries]


def called(path: Path | Member, request: Request, number: int) -> str:
    """The name of a picture in messages: its file, or, if that may name a person, its place.

    number: in the order of the table, where labels are in one; otherwise the place is that in the class's folder.
    """
    if isinstance(path, Member) or (request.tabled and request.groups is not None):
        return f"picture {number} of {request.path}, in the order of its table,"
    if request.groups is None:
        return str(path)
    root = request.required_path()
    if request.several:
        return f"{place_of(path, pictures_below(root), root)},"
    folder = root.joinpath(*path.relative_to(root).parts[: len(parts_of(root))])
    return f"{place_of(path, pictures_in(folder, request.groups.folder), folder)},"


def visible(folder: Path) -> list[Path]:
    """The entries of a folder, by name, without hidden files and those of operating systems."""
    entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    return [e for e in entries if not e.name.startswith(".") and e.name.lower() not in LEFT_BY_SYSTEMS]


def pictures_of(
    files: list[Place], every: list[Place], request: Request, shapes: list[tuple[int, ...]]
) -> Iterator[Example]:
    """Picture files decoded one by one. shapes: takes the shape of the first picture, which all must have.

    Raises DataError that names all of `every` that cannot be read, or whose size or channels differ.
    """
    for path, label in files:
        try:
            image = fit(decode(path, span=request.range), request, str(path))
        except RangeMissing:
            raise
        except DataError:
            raise refusal(problems_of(every, request)) from None
        if not shapes:
            shapes.append(image.shape)
        if image.shape != shapes[0]:
            raise refusal(problems_of(every, request))
        yield image, label


def problems_of(files: Iterable[Place], request: Request, start: int = 1) -> list[str]:
    """One sentence for each file that cannot be used, and one for all whose size or channels differ.

    start: the number of the first file, in the order of all.
    """
    problems: list[str] = []
    shapes: dict[str, tuple[int, ...]] = {}  # by the name in messages
    for number, (path, _) in enumerate(files, start):
        name = called(path, request, number)
        try:
            shapes[name] = fit(decode(path, name, request.range), request, name).shape
        except DataError as error:
            problems.append(str(error))
    first = next(iter(shapes), "")
    if odd := [name for name, shape in shapes.items() if shape != shapes[first]]:
        sizes, channels = {shape[:2] for shape in shapes.values()}, {shape[2] for shape in shapes.values()}
        differs = {"size": len(sizes) > 1, "channels": len(channels) > 1}
        wish = " and ".join(f"{request.section}.{key}" for key, value in differs.items() if value)
        others = f" ({len(odd) - 1} more differ)" if len(odd) > 1 else ""
        problems.append(
            f"{odd[0]} is {describe(shapes[odd[0]])} but {first} is {describe(shapes[first])}{others}: "
            f"set {wish} to convert all alike."
        )
    return problems


def refusal(problems: Sequence[str]) -> DataError:
    """The error that names all problems, one line each."""
    if len(problems) == 1:
        return DataError(problems[0])
    more = [f"and {len(problems) - NAMED} more."] if len(problems) > NAMED else []
    return DataError("\n".join([f"{len(problems)} files cannot be used:", *problems[:NAMED], *more]))


def describe(shape: tuple[int, ...]) -> str:
    return f"{shape[0]}×{shape[1]} {'grey' if shape[2] == 1 else 'colour'}"


def decode(path: Path | Member, name: str = "", span: Span | None = None) -> np.ndarray:
    """A picture file as (H, W, 1) or (H, W, 3) uint8: upright, transparency over black.

    name: in messages, by default its path; span: shows files with more than 8 bits, as `deep.shown` does.
    """
    from PIL import Image, ImageOps

    name = name or str(path)
    if isinstance(path, Path) and is_dicom(path):
        return decode_dicom(path, name, span)
    Image.init()
    known = [form for form in FORMATS.split() if form in Image.OPEN]  # what this Pillow was built with
    try:
        with Image.open(path if isinstance(path, Path) else path.opened(), formats=known) as opened:
            if (frames := getattr(opened, "n_frames", 1)) > 1:
                raise DataError(f"{name} holds {frames} frames: save the one to use as a picture of its own.")
            opened.load()
            picture: Image.Image = ImageOps.exif_transpose(opened)
    except DataError:
        raise
    except Exception as error:  # whatever a decoder raises for damaged bytes, it is of this one file
        why = error if name == str(path) else type(error).__name__  # the text of some errors names the file
        raise DataError(f"{name} cannot be read as an image ({why}): repair or remove it.") from error
    if picture.mode.startswith("I;16") or picture.mode in ("I", "F"):
        return shown(np.asarray(picture), span, name, "32-bit pixels" if picture.mode in ("I", "F") else "16-bit grey")
    if picture.has_transparency_data:
        mode = "L" if picture.mode in ("LA", "La", "L", "1") else "RGB"
        picture = picture.convert("RGBA")
        if picture.getchannel("A").getbbox() is None:
            raise DataError(f"{name} is fully transparent: save it without transparency, or remove it.")
        black = Image.new("RGBA", picture.size, (0, 0, 0, 255))
        picture = Image.alpha_composite(black, picture).convert(mode)
    array = np.asarray(picture.convert("L" if picture.mode in ("1", "L") else "RGB"))
    return array if array.ndim == 3 else array[..., None]
