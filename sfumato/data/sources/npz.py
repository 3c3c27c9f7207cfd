"""NumPy archives: a set of the user, and the batches of the downsampled ImageNet. Pickles are refused."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import numpy as np

from sfumato.data.groups import checked, ids_of_array
from sfumato.data.images import GROUPS_REFUSED
from sfumato.data.sources.source import Example, Request, Source, check_labels, examples, fit
from sfumato.errors import UNREADABLE, ConfigError, DataError, explained

IMAGENET_CLASSES = 1000
IMAGENET_ROW = 3072  # bytes of an image: 1024 red, 1024 green, 1024 blue
ROWS = 512  # read at once


def unzipped(path: Path, wrong: str, fix: str) -> AbstractContextManager[None]:
    """Raise DataError where an archive cannot be read."""
    causes = (*UNREADABLE, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)  # encrypted ones: RuntimeError
    return explained(DataError, lambda error: f"{path} {wrong} ({error}): {fix}", causes=causes)


def read_npz(request: Request, raw: Path) -> Source:
    """`images` (N, H, W) or (N, H, W, C) uint8, `labels` (N,) integers, `classes`: the names, as an array of strings.

    The names must be in the file: if the labels were counted instead, the public class list would depend on who is in
    the set.
    """
    path = request.required_path()
    if not path.is_file():
        raise DataError(
            f"{request.section}.path={path} is not a file: expected an .npz with images, labels and classes."
        )
    plain = "write it with np.savez and plain arrays."
    with unzipped(path, "cannot be read as .npz without pickle", plain):
        check_members(path)
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    missing = [key for key in ("images", "labels", "classes") if key not in arrays]
    if missing:
        raise DataError(
            f"{path} has no array named {', '.join(missing)}: "
            "write it with np.savez(path, images=…, labels=…, classes=…)."
        )
    if request.sensitive and "groups" in arrays and request.groups is None:
        raise DataError(f"{path}: `groups` {GROUPS_REFUSED}.")
    images, labels, classes = arrays["images"], arrays["labels"], arrays["classes"]
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        raise DataError(
            f"{path}: images are {images.dtype} {images.shape}, expected uint8 (N, H, W) or (N, H, W, C) with C 1 or 3."
        )
    if labels.dtype.kind not in "iu" or labels.shape != (len(images),):
        raise DataError(f"{path}: labels are {labels.dtype} {labels.shape}, expected integers ({len(images)},).")
    if not len(images):
        raise DataError(f"{path} holds no images.")
    if classes.dtype.kind != "U" or classes.ndim != 1 or not len(classes) or len(set(classes)) != len(classes):
        raise DataError(
            f"{path}: classes are {classes.dtype} {classes.shape}, expected distinct names, an array of strings."
        )
    names = tuple(str(name) for name in classes)
    check_labels(labels, names, path)
    ids = None
    if request.groups is not None:
        if not request.groups.array:
            raise ConfigError("data.groups: an archive has no file names, so its ids are an array: say {array: true}")
        if "groups" not in arrays:
            raise DataError(f"{path} has no array named groups: write it with np.savez(path, …, groups=…).")
        ids = checked(ids_of_array(arrays["groups"], len(images), f"{path}: `groups`"), request.groups)
    return Source(names, examples(images, labels, request, path.name), None, len(images), ids)


def read_imagenet32(request: Request, raw: Path) -> Source:
    """The downsampled ImageNet: `train_data_batch_<n>.npz` with `data` (N, 3072) uint8 and `labels` (N,) in 1..1000.

    Reads every batch it finds, in order and in pieces, so that memory does not grow with them. The names of the classes
    come from `map_clsloc.txt` (from the same place) where it lies beside them. Source: Chrabaszcz, Loshchilov, Hutter
    2017.
    """
    place = raw / "imagenet32" if request.path is None else request.required_path()
    files = sorted(place.glob("train_data_batch_*.npz"), key=lambda path: (len(path.name), path.name))
    if not files:
        raise DataError(
            f"{place} holds no train_data_batch_*.npz: "
            "unpack ImageNet's 32×32 version for NumPy (image-net.org, after registration) there, "
            f"or name its folder by {request.section}.path."
        )
    labels = [read_imagenet_labels(path) for path in files]
    return Source(imagenet_names(place), imagenet_examples(files, labels, request), None, sum(map(len, labels)))


def read_imagenet_labels(path: Path) -> np.ndarray:
    """The labels of a batch, less one. Raises DataError where its images or labels have another form."""
    again = "fetch it again; it must hold `data` and `labels`."
    with unzipped(path, "cannot be read as a batch of ImageNet-32", again):
        check_members(path)
        with np.load(path, allow_pickle=False) as archive:
            labels = archive["labels"]
        with zipfile.ZipFile(path) as archive, archive.open("data.npy") as member:
            shape, rowwise, dtype = read_npy_header(member)
    if dtype != np.uint8 or len(shape) != 2 or shape[1] != IMAGENET_ROW or not rowwise:
        raise DataError(
            f"{path}: data is {dtype} {shape}, expected uint8 (N, {IMAGENET_ROW}), row by row: "
            "take the 32×32 version for NumPy."
        )
    if labels.dtype.kind not in "iu" or labels.shape != shape[:1]:
        raise DataError(f"{path}: labels are {labels.dtype} {labels.shape}, expected {shape[0]} integers.")
    if len(labels) and not (labels.min() >= 1 and labels.max() <= IMAGENET_CLASSES):
        raise DataError(f"{path} has labels {labels.min()}..{labels.max()}, expected 1..{IMAGENET_CLASSES}.")
    return labels.astype(np.int64) - 1


def check_members(path: Path) -> None:
    """Raise ValueError where an array claims more values than the archive has bytes of it: NumPy would believe it."""
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            with archive.open(info) as member:
                shape, _, dtype = read_npy_header(member)
            if math.prod(shape) * dtype.itemsize > info.file_size or min(shape, default=0) < 0:
                raise ValueError(f"{info.filename} claims the shape {shape} and has {info.file_size:,} bytes")


def read_npy_header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """(shape, whether stored row by row, type) of the array in a .npy stream, which is left at the first value."""
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, columnwise, dtype = read(member)
    return shape, not columnwise, dtype


def imagenet_examples(files: Sequence[Path], labels: Sequence[np.ndarray], request: Request) -> Iterator[Example]:
    for path, batch in zip(files, labels, strict=True):
        start = 0
        for rows in imagenet_rows(path, len(batch)):
            images = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            for i, image in enumerate(images, start):
                yield fit(image, request, f"{path.name}, image {i}"), int(batch[i])
            start += len(images)


def imagenet_rows(path: Path, count: int) -> Iterator[np.ndarray]:
    """`data` of a batch in pieces, (n, 3072) uint8 with n at most ROWS."""
    corrupt = unzipped(path, "is truncated or corrupt", "fetch it again.")
    with corrupt, zipfile.ZipFile(path) as archive, archive.open("data.npy") as member:
        read_npy_header(member)
        for start in range(0, count, ROWS):
            wanted = min(ROWS, count - start) * IMAGENET_ROW
            content = member.read(wanted)
            if len(content) != wanted:
                raise EOFError(f"it ends within image {start + len(content) // IMAGENET_ROW}")
            yield np.frombuffer(content, np.uint8).reshape(-1, IMAGENET_ROW)


def imagenet_names(place: Path) -> tuple[str, ...]:
    """The names of the classes in the order of their labels, from lines such as "n02119789 1 kit_fox".

    A name that two classes share gets the id of each added. Without the file, names are class-0000, class-0001, ….
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
