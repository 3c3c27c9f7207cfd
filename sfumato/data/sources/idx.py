"""Read MNIST and the sets in its file format: Fashion-MNIST, KMNIST and EMNIST."""

import gzip
import math
import struct
import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from sfumato.data.images import check_labels
from sfumato.data.sources.source import Request, Source, download, examples
from sfumato.errors import DataError, explained
from sfumato.storage.files import reading

# Installed by Debian's package dataset-fashion-mnist
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


class IdxSet(NamedTuple):
    """The name of a set in torchvision, its classes and its files.

    `splits`: prefixes of the names of the training files and of the test files.
    """

    torchvision: str
    classes: tuple[str, ...]
    splits: tuple[str, str] = ("train", "t10k")
    transposed: bool = False
    options: Mapping[str, str] = MappingProxyType({})  # further arguments of torchvision's class


IDX_SETS = {
    "mnist": IdxSet("MNIST", tuple("0123456789")),
    "fashion-mnist": IdxSet(
        "FashionMNIST",
        (
            "t-shirt",
            "trouser",
            "pullover",
            "dress",
            "coat",
            "sandal",
            "shirt",
            "sneaker",
            "bag",
            "ankle boot",
        ),
    ),
    "kmnist": IdxSet("KMNIST", ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")),
    "emnist": IdxSet(
        "EMNIST",
        # "balanced": small letters that look like their capitals are merged with them
        tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"),
        ("emnist-balanced-train", "emnist-balanced-test"),
        transposed=True,
        options={"split": "balanced"},
    ),
}


def read_idx_set(request: Request, raw: Path) -> Source:
    """Read a set of idx files, gzipped or not, from the folder `request.path`.

    Without a path, the usual folders are searched, and missing files are downloaded.
    """
    idx_set = IDX_SETS[request.name]
    splits = idx_set.splits if request.sensitive else idx_set.splits[:1]
    stems = [
        f"{split}-{kind}" for split in splits for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ]
    home = Path(request.path or raw / request.name).expanduser()
    folders = [home, home / "gzip"]  # EMNIST's archive unpacks into gzip/
    if request.path is None:
        folders.append(raw / idx_set.torchvision / "raw")  # folder of torchvision's downloads
        if request.name == "fashion-mnist":
            folders.insert(0, DEBIAN_FASHION_MNIST)
    files = first_with_all(folders, stems)
    if files is None and request.path is None:
        fix = f"Put the files {', '.join(f'{stem}.gz' for stem in stems)} into {home} by hand"
        download(idx_set.torchvision, raw, fix, test=request.sensitive, **idx_set.options)
        files = first_with_all(folders, stems)
    if files is None:
        raise DataError(
            f"no folder contains all of the files {', '.join(f'{stem}[.gz]' for stem in stems)}: "
            f"put all of them into one of these folders: {', '.join(map(str, folders))}."
        )
    parts = []
    size = 0
    for images_file, labels_file in zip(files[::2], files[1::2], strict=True):
        images = read_idx(images_file)
        labels = read_idx(labels_file)
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise DataError(
                f"{images_file} has the shape {images.shape}, and {labels_file.name} has the shape "
                f"{labels.shape}, so these files do not belong together: fetch both again."
            )
        check_labels(labels, idx_set.classes, labels_file)
        size += len(images)
        upright = images.transpose(0, 2, 1) if idx_set.transposed else images
        parts.append(examples(upright, labels, request, images_file.name))
    train, *test = parts
    return Source(idx_set.classes, train, next(iter(test), None), size)


def first_with_all(folders: list[Path], stems: list[str]) -> list[Path] | None:
    """Return the files named by `stems` in the first folder that contains all of them.

    Returns None if no folder does. stems: names without `.gz`. Each file may be gzipped or plain.
    """
    for folder in folders:
        files = {
            stem: file
            for stem in stems
            for file in (folder / stem, folder / f"{stem}.gz")
            if file.is_file()
        }
        if len(files) == len(stems):
            return [*files.values()]
    return None


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file of unsigned bytes.

    The file consists of the bytes 0, 0 and 8, one byte with the number of axes, one big-endian
    int32 per axis, and the values.
    """
    broken = f"{path} is truncated or corrupt"
    largest = 2**29  # maximum number of values to read; the supported sets have fewer than 10⁸
    causes = (OSError, EOFError, zlib.error, struct.error)
    with (
        explained(DataError, lambda error: f"{broken} ({error}): fetch it again.", causes=causes),
        reading(path) as raw_file,
        gzip.open(raw_file) if path.suffix == ".gz" else nullcontext(raw_file) as file,
    ):
        magic = file.read(4)
        if magic[:3] != b"\0\0\x08" or len(magic) < 4:
            start = magic.hex() or "nothing"
            raise DataError(
                f"{path} is not an idx file of unsigned bytes: it starts with {start}, expected "
                "000008. Fetch it again."
            )
        shape = struct.unpack(f">{magic[3]}i", file.read(4 * magic[3]))
        size = math.prod(shape)
        if min(shape, default=0) < 0 or size > largest:
            raise DataError(
                f"{broken}: its header states {shape}, expected at most {largest:,} values. Fetch "
                "it again, or use an .npz instead."
            )
        # Reading one byte more than expected reveals whether the file has too many values. The rest
        # is not read, because a gzip file can expand without limit
        content = file.read(size + 1)
    if len(content) != size:
        count = len(content) if len(content) < size else f"more than {size}"
        raise DataError(f"{broken}: it has {count} values for the shape {shape}. Fetch it again.")
    return np.frombuffer(content, np.uint8).reshape(shape)
