"""MNIST and the sets in its file format: Fashion-MNIST, KMNIST and EMNIST."""

import gzip
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sfumato.data.images import check_labels
from sfumato.data.sources.source import Request, Source, download, examples
from sfumato.errors import DataError, explained

LARGEST = 2**32  # values of a file; the largest set in this format has 6 · 10⁸
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # where the package dataset-fashion-mnist puts it


@dataclass(frozen=True)
class IdxSet:
    """The names and files of a set. `splits`: how the names of its training and test files begin."""

    torchvision: str
    classes: tuple[str, ...]
    splits: tuple[str, str] = ("train", "t10k")
    transposed: bool = False
    options: Mapping[str, str] = field(default_factory=dict)  # for torchvision


IDX_SETS = {
    "mnist": IdxSet("MNIST", tuple("0123456789")),
    "fashion-mnist": IdxSet(
        "FashionMNIST",
        ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
    "kmnist": IdxSet("KMNIST", ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")),
    "emnist": IdxSet(
        "EMNIST",
        # "balanced": letters that look alike in both cases are merged
        tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"),
        ("emnist-balanced-train", "emnist-balanced-test"),
        transposed=True,
        options={"split": "balanced"},
    ),
}


def read_idx_set(request: Request, raw: Path) -> Source:
    """A set of idx files, gzipped or not: from `request.path`, else the usual places, else a download."""
    known = IDX_SETS[request.name]
    splits = known.splits if request.sensitive else known.splits[:1]
    stems = [f"{split}-{kind}" for split in splits for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    if request.path is not None:
        places = [place := Path(request.path).expanduser(), place / "gzip"]  # EMNIST's archive unpacks into the second
    else:
        system = [DEBIAN_FASHION_MNIST] if request.name == "fashion-mnist" else []
        # torchvision downloads to the last one.
        places = [*system, raw / request.name, raw / request.name / "gzip", raw / known.torchvision / "raw"]
    files = first_with_all(places, stems)
    if files is None and request.path is None:
        fix = f"Put the files {', '.join(f'{stem}.gz' for stem in stems)} into {raw / request.name} by hand"
        download(known.torchvision, raw, fix, test=request.sensitive, **known.options)
        files = first_with_all(places, stems)
    if files is None:
        raise DataError(f"{', '.join(map(str, places))}: none holds {', '.join(f'{stem}[.gz]' for stem in stems)}.")
    parts, size = [], 0
    for images_file, labels_file in zip(files[::2], files[1::2], strict=True):
        images, labels = read_idx(images_file), read_idx(labels_file)
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            shapes = f"{images.shape} and its labels {labels.shape}"
            raise DataError(f"{images_file} has shape {shapes}: these do not belong together.")
        check_labels(labels, known.classes, labels_file)
        size += len(images)
        upright = images.transpose(0, 2, 1) if known.transposed else images
        parts.append(examples(upright, labels, request, images_file.name))
    return Source(known.classes, parts[0], parts[1] if request.sensitive else None, size)


def first_with_all(places: list[Path], stems: list[str]) -> list[Path] | None:
    """The files of the first folder that holds all of `stems`, each gzipped or plain."""
    for place in places:
        found = [next(filter(Path.is_file, (place / f"{stem}.gz", place / stem)), None) for stem in stems]
        whole = [path for path in found if path is not None]
        if len(whole) == len(stems):
            return whole
    return None


def read_idx(path: Path) -> np.ndarray:
    """An idx file of unsigned bytes: magic 0, 0, 8, rank; then one big-endian int32 per axis; then the bytes."""
    broken, causes = f"{path} is truncated or corrupt", (OSError, EOFError, zlib.error, struct.error)
    with (
        explained(DataError, lambda error: f"{broken} ({error}): fetch it again.", causes=causes),
        gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file,
    ):
        magic = file.read(4)
        if magic[:3] != b"\0\0\x08" or len(magic) < 4:
            start = magic.hex() or "nothing"
            raise DataError(f"{path} is not an idx file of unsigned bytes: it starts with {start}, expected 000008.")
        header = file.read(4 * magic[3])
        shape = struct.unpack(f">{magic[3]}i", header)
        size = math.prod(shape)
        if min(shape, default=0) < 0 or size > LARGEST:
            raise DataError(f"{broken}: its header says {shape}, expected at most {LARGEST:,} values. Fetch it again.")
        content = file.read(size + 1)  # a few bytes of gzip can stand for any number: only what is meant is unpacked
    if len(content) != size:
        more = "more than " if len(content) > size else ""
        raise DataError(f"{broken}: {more}{min(size, len(content))} values for shape {shape}. Fetch it again.")
    return np.frombuffer(content, np.uint8).reshape(shape)
