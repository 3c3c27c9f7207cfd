"""NumPy archives: a set of the owner, and the batches of the downsampled ImageNet. Pickles are refused."""

import math
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain, repeat
from pathlib import Path
from typing import IO, Any

import numpy as np

from sfumato.data.groups import checked, ids_of_array
from sfumato.data.images import GROUPS_REFUSED, check_labels
from sfumato.data.sources.source import Example, Request, Source, examples
from sfumato.errors import UNREADABLE, ConfigError, DataError, explained

IMAGENET_CLASSES = 1000
IMAGENET_ROW = 3072  # bytes of an image: 1024 red, 1024 green, 1024 blue
ROWS = 512  # read at once
PLAIN = "write it with np.savez and plain arrays."
Header = tuple[tuple[int, ...], bool, np.dtype]  # shape, whether it is stored column by column, type


def unzipped(path: Path, wrong: str, fix: str) -> AbstractContextManager[None]:
    """Raise DataError if an archive cannot be read."""
    causes = (*UNREADABLE, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)  # encrypted ones: RuntimeError
    return explained(DataError, lambda error: f"{path} {wrong} ({error}): {fix}", causes=causes)


def read_npz(request: Request, raw: Path) -> Source:
    """`images` (N, H, W) or (N, H, W, C) uint8, `labels` (N,) integers, `classes`: the names, as an array of strings.

    With `data.labels: several`, labels are (N, classes) of 0 and 1.
    Or MedMNIST's own file: `train_images`, `train_labels` (N,) or (N, 1), `val_…`, and `test_…` as the hold-out. It
    holds no names: `data.classes` gives them, for classes that occur would depend on the images. The ids of persons are
    the array `groups`, or the one that `data.groups.column` names.
    """
    path = request.required_path()
    if not path.is_file():
        wanted = "an .npz with images, labels and classes, or a file of MedMNIST"
        raise DataError(f"{request.section}.path={path} is not a file: expected {wanted}.")
    if request.groups is not None and not (request.groups.array or request.groups.column):
        raise ConfigError("data.groups: an archive has no file names, so its ids are an array: set {array: true}")
    owners = "" if request.groups is None else request.groups.column or "groups"
    with unzipped(path, "cannot be read as .npz without pickle", PLAIN):
        headers = headers_of(path)
        medmnist = "train_images.npy" in headers
        parts = [part for part in ("train_", "val_", "test_") if f"{part}images.npy" in headers] if medmnist else [""]
        needed = [f"{part}{name}" for part in parts for name in ("images", "labels")]
        needed += [] if medmnist and request.classes else ["classes"]
        ids_in = [owners] if f"{owners}.npy" in headers else [f"{part}{owners}" for part in parts]
        needed += ids_in if owners else []
        if missing := [name for name in needed if f"{name}.npy" not in headers]:
            names = f" Name the classes in their order: {request.section}.classes: [a, b, …]." if medmnist else ""
            raise DataError(f"{path} has no array named {', '.join(missing)}: {PLAIN}{names}")
        with np.load(path, allow_pickle=False) as archive:
            given = archive["classes"] if "classes" in needed else np.array(request.classes)
            groups = np.concatenate([archive[name] for name in ids_in]) if owners else None
    if request.sensitive and "groups.npy" in headers and request.groups is None:
        raise DataError(f"{path}: `groups` {GROUPS_REFUSED}.")
    if given.dtype.kind != "U" or given.ndim != 1 or not len(given) or len(set(given)) != len(given):
        raise DataError(f"{path}: classes are {given.dtype} {given.shape}, expected distinct names as strings.")
    classes = tuple(str(name) for name in given)
    count = sum(check_arrays(path, headers, part, classes, request.several) for part in parts)
    held_out = int(headers["test_images.npy"][0][0]) if "test_" in parts else 0
    ids = None
    if request.groups is not None and groups is not None:
        ids = checked(ids_of_array(groups, count, f"{path}: `{owners}`"), request.groups)
    train = examples_in(path, [part for part in parts if part != "test_"], request)
    test = examples_in(path, ["test_"], request) if "test_" in parts and request.sensitive else None
    return Source(classes, train, test, count, ids, labels=labels_in(path, parts, request), held_out=held_out)


def archive_layout(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The keys of the Request that an archive is of; labels without names, as MedMNIST has them, get numbers.

    And the names of its arrays, without those of the parts in front.
    """
    with unzipped(path, "cannot be read as .npz without pickle", PLAIN):
        headers = headers_of(path)
        with np.load(path, allow_pickle=False) as archive:
            labels = [archive[name] for name in archive if name.endswith("labels") and archive[name].size]
        several = any(part.ndim == 2 and part.shape[1] > 1 for part in labels)
        form: dict[str, Any] = {"name": "npz", "several": several}
        if "classes.npy" not in headers and labels:
            count = labels[0].shape[-1] if several else 1 + int(max(part.max() for part in labels))
            form["classes"] = tuple(map(str, range(count)))
    return form, sorted({re.sub(r"^(train|val|test)_|\.npy$", "", name) for name in headers})


def check_arrays(path: Path, headers: Mapping[str, Header], part: str, classes: tuple[str, ...], several: bool) -> int:
    """How many images a part has. Raises DataError unless an archive's arrays are images and the labels of each."""
    images, labels = f"{part}images", f"{part}labels"
    (shape, _, dtype), (labels_shape, _, labels_dtype) = headers[f"{images}.npy"], headers[f"{labels}.npy"]
    if dtype != np.uint8 or len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in (1, 3)):
        raise DataError(f"{path}: {images} are {dtype} {shape}, expected uint8 (N, H, W) or (N, H, W, C) with C 1 or 3")
    wanted = [(*shape[:1], len(classes))] if several else [shape[:1], (*shape[:1], 1)]
    if labels_dtype.kind not in "iu" or labels_shape not in wanted:
        way = "" if several else "; of several labels an image, set data.labels: several"
        raise DataError(f"{path}: {labels} are {labels_dtype} {labels_shape}, expected integers {wanted[0]}{way}.")
    for rows in npy_rows(path, labels):
        check_labels(rows if several else rows.reshape(-1), classes, path)
    return int(shape[0])


def examples_in(path: Path, parts: Sequence[str], request: Request) -> Iterator[Example]:
    """The images of some parts of an archive, one by one, with their labels."""
    for name in parts:
        images = chain.from_iterable(npy_rows(path, f"{name}images"))
        yield from examples(images, labels_in(path, [name], request), request, path.name)


def labels_in(path: Path, parts: Sequence[str], request: Request) -> Iterator[Any]:
    for rows in chain.from_iterable(npy_rows(path, f"{name}labels") for name in parts):
        yield from rows if request.several else rows.reshape(-1)


def npy_rows(path: Path, name: str, fix: str = PLAIN) -> Iterator[np.ndarray]:
    """An array of an archive in pieces of ROWS rows at most; whole if it was stored column by column."""
    corrupt = unzipped(path, "is truncated or corrupt", fix)
    with corrupt, zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as member:
        shape, columnwise, dtype = read_header(member)
        if columnwise and len(shape) > 1:
            with np.load(path, allow_pickle=False) as whole:
                yield whole[name]
            return
        size = math.prod(shape[1:]) * dtype.itemsize
        for start in range(0, shape[0], ROWS):
            wanted = min(ROWS, shape[0] - start) * size
            content = member.read(wanted)
            if len(content) != wanted:
                raise EOFError(f"`{name}` ends within its row {start + len(content) // size}")
            yield np.frombuffer(content, dtype).reshape(min(ROWS, shape[0] - start), *shape[1:])
        member.read(1)  # at the end of a member its checksum is compared


def read_imagenet32(request: Request, raw: Path) -> Source:
    """The downsampled ImageNet: `train_data_batch_<n>.npz` with `data` (N, 3072) uint8 and `labels` (N,) in 1..1000.

    A `map_clsloc.txt` beside them names the classes. Source: Chrabaszcz, Loshchilov, Hutter 2017.
    """
    place = raw / "imagenet32" if request.path is None else request.required_path()
    files = sorted(place.glob("train_data_batch_*.npz"), key=lambda path: (len(path.name), path.name))
    if not files:
        raise DataError(
            f"{place} holds no train_data_batch_*.npz: unpack ImageNet's 32×32 version for NumPy (image-net.org, after "
            f"registration) there, or name its folder by {request.section}.path."
        )
    labels = [read_imagenet_labels(path) for path in files]
    rows = (chain.from_iterable(npy_rows(path, "data", "fetch it again.")) for path in files)
    images = [(row.reshape(3, 32, 32).transpose(1, 2, 0) for row in own) for own in rows]
    parts = map(examples, images, labels, repeat(request), [path.name for path in files])
    return Source(imagenet_names(place), chain.from_iterable(parts), None, sum(map(len, labels)))


def read_imagenet_labels(path: Path) -> np.ndarray:
    """The labels of a batch, less one. Raises DataError if its images or labels have another form."""
    again = "fetch it again; it must hold `data` and `labels`."
    with unzipped(path, "cannot be read as a batch of ImageNet-32", again):
        shape, columnwise, dtype = headers_of(path)["data.npy"]
        with np.load(path, allow_pickle=False) as archive:
            labels = archive["labels"]
    if dtype != np.uint8 or len(shape) != 2 or shape[1] != IMAGENET_ROW or columnwise:
        wanted = f"uint8 (N, {IMAGENET_ROW}), row by row"
        raise DataError(f"{path}: data is {dtype} {shape}, expected {wanted}: take the 32×32 version for NumPy.")
    if labels.dtype.kind not in "iu" or labels.shape != shape[:1]:
        raise DataError(f"{path}: labels are {labels.dtype} {labels.shape}, expected {shape[0]} integers.")
    if len(labels) and not (labels.min() >= 1 and labels.max() <= IMAGENET_CLASSES):
        raise DataError(f"{path} has labels {labels.min()}..{labels.max()}, expected 1..{IMAGENET_CLASSES}.")
    return labels.astype(np.int64) - 1


def headers_of(path: Path) -> dict[str, Header]:
    """The header of every file in it. Raises ValueError if one claims more bytes than there are: NumPy believes it."""
    found = {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            with archive.open(info) as member:
                shape, _, dtype = found[info.filename] = read_header(member)
            if math.prod(shape) * dtype.itemsize > info.file_size or min(shape, default=0) < 0:
                raise ValueError(f"{info.filename} claims the shape {shape} and has {info.file_size:,} bytes")
    return found


def read_header(member: IO[bytes]) -> Header:
    """The header of the array in a .npy stream, which is left at the first value."""
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    header: Header = read(member)
    return header


def imagenet_names(place: Path) -> tuple[str, ...]:
    """The class names by label, from lines such as "n02119789 1 kit_fox"; with the id if two share a name.

    Without the file, names are class-0000, class-0001, ….
    """
    file = place / "map_clsloc.txt"
    if not file.is_file():
        return tuple(f"class-{label:04d}" for label in range(IMAGENET_CLASSES))
    wrong = f"{file} does not name classes 1..{IMAGENET_CLASSES}, one a line"
    with explained(DataError, lambda error: f"{wrong} ({error!r}): fetch it again, or remove it."):
        entries = {
            int(label): (name, identity)
            for identity, label, name in map(str.split, file.read_text(encoding="utf-8").splitlines())
        }
        ordered = [entries[label] for label in range(1, IMAGENET_CLASSES + 1)]
    times = Counter(name for name, _ in ordered)
    return tuple(name if times[name] == 1 else f"{name}-{identity}" for name, identity in ordered)
