"""Image sets in memory and on disk: `images.npy` uint8 (N, H, W, C) beside `labels.npy` int64 (N,), memory-mapped when read."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import DataError

IMAGES, LABELS, GROUPS = "images.npy", "labels.npy", "groups.npy"
GROUPS_REFUSED = (
    "holds one id per image (a patient, say): refused until group privacy exists. Remove it only if none share a person"
)


@dataclass(frozen=True)
class ImageSet:
    """Labelled images.

    images: (N, H, W, C) uint8, possibly a memory map; labels: (N,) int64 below len(classes).
    """

    images: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""
        height, width, channels = self.images.shape[1:]
        return channels, height, width

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """The images at `indices` (none is fine) as ((B, C, H, W) float32 in [0, 1], (B,) int64), copied out of any memory map."""
        indices = np.asarray(indices, dtype=np.int64)
        images = torch.from_numpy(np.array(self.images[indices]))
        labels = torch.from_numpy(np.array(self.labels[indices]))
        return images.permute(0, 3, 1, 2).contiguous().float().div_(255), labels

    def without(self, i: int) -> ImageSet:
        """The same set less image `i`: its neighbour, for tests of guarantees."""
        return ImageSet(np.delete(self.images, i, axis=0), np.delete(self.labels, i, axis=0), self.classes)


class ImageWriter:
    """Appends images one by one to `images.npy` and `labels.npy`, in memory that does not grow with their number.

    A context manager; the files are whole once it is left. Leaving it by an exception leaves unfinished files: write into a
    temporary directory and rename it.
    """

    def __init__(self, directory: Path, shape: tuple[int, int, int], classes: tuple[str, ...]) -> None:
        channels, height, width = shape
        self.row = (height, width, channels)
        self.classes = classes
        self.count = 0
        directory.mkdir(parents=True, exist_ok=True)
        self.images = open_private(directory / IMAGES)
        self.labels = open_private(directory / LABELS)
        self.write_headers()

    def write_headers(self) -> None:
        # numpy pads the header so that it keeps its length while the first axis grows: it can be rewritten in place
        for file, dtype, row in ((self.images, np.uint8, self.row), (self.labels, np.int64, ())):
            file.seek(0)
            header = {
                "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
                "fortran_order": False,
                "shape": (self.count, *row),
            }
            np.lib.format.write_array_header_1_0(file, header)

    def append(self, image: np.ndarray, label: int) -> None:
        """One image, (H, W, C) uint8, and its label. Raises DataError where they do not fit the set."""
        if image.dtype != np.uint8 or image.shape != self.row:
            raise DataError(f"an image is {image.dtype} {image.shape}, expected uint8 {self.row}")
        if not 0 <= label < len(self.classes):
            raise DataError(
                f"label {label} is out of range: there are {len(self.classes)} classes, so 0..{len(self.classes) - 1}"
            )
        self.images.write(image.tobytes())
        self.labels.write(np.int64(label).tobytes())
        self.count += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.images, self.labels:
            if kind is None:
                self.write_headers()


def open_private(path: Path) -> BinaryIO:
    """A new file that only its owner may read (mode 0600)."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w+b")


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file under a temporary name, then rename it: readers see the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_images(directory: Path, image_set: ImageSet) -> None:
    """Write `images.npy` and `labels.npy` into `directory`, each under a temporary name first."""
    check(image_set.images, image_set.labels, image_set.classes, directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name, array in ((IMAGES, image_set.images), (LABELS, image_set.labels)):
        temporary = directory / f".{name}.{os.getpid()}.tmp"
        try:
            with temporary.open("wb") as file:
                np.save(file, array, allow_pickle=False)
            os.replace(temporary, directory / name)
        finally:
            temporary.unlink(missing_ok=True)


def load_images(directory: Path, classes: Iterable[str]) -> ImageSet:
    """The set saved in `directory`, memory-mapped read-only and validated. Raises DataError naming the file and the fix."""
    if (directory / GROUPS).exists():
        raise DataError(f"{directory / GROUPS} {GROUPS_REFUSED}.")
    images, labels = (load_array(directory / name) for name in (IMAGES, LABELS))
    check(images, labels, names := tuple(classes), directory)
    return ImageSet(images, labels, names)


def load_array(path: Path) -> np.ndarray:
    if not path.is_file():
        raise DataError(f"{path} is missing: run the stage that writes it.")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} is no whole .npy file ({error}): write it again.") from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path} is an archive, expected one .npy array.")
    return array


def check(images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], directory: Path) -> None:
    """Raise DataError unless the arrays are a valid set over `classes`."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape[1:]:
        raise DataError(
            f"{directory / IMAGES} is {images.dtype} {images.shape}, expected uint8 (N, H, W, C) with C 1 or 3."
        )
    if labels.dtype != np.int64 or labels.ndim != 1:
        raise DataError(f"{directory / LABELS} is {labels.dtype} {labels.shape}, expected int64 (N,).")
    if len(labels) != len(images):
        raise DataError(f"{directory} holds {len(images)} images but {len(labels)} labels: write both again.")
    if len(labels) and not (labels.min() >= 0 and labels.max() < len(classes)):
        found = f"{labels.min()}..{labels.max()}"
        raise DataError(
            f"{directory / LABELS} has labels {found}, expected 0..{len(classes) - 1} for {len(classes)} classes."
        )


def to_grid(images: Tensor | np.ndarray, columns: int, smallest: int = 48) -> np.ndarray:
    """Images side by side, row by row, for looking at.

    images: (N, C, H, W) float in [0, 1], clamped to it, NaN shown black. An image with a side under `smallest` pixels is
    magnified by a whole number, without smoothing. Returns (H', W', C) uint8 on a white ground.
    """
    array = torch.as_tensor(images).detach().float().cpu().nan_to_num(0.0).clamp(0, 1).mul(255).round().byte().numpy()
    count, channels, height, width = array.shape
    factor, gap = max(1, math.ceil(smallest / min(height, width))), 2
    array = array.transpose(0, 2, 3, 1).repeat(factor, axis=1).repeat(factor, axis=2)  # (N, fH, fW, C)
    columns = max(1, min(columns, count))
    rows, height, width = math.ceil(count / columns), height * factor, width * factor
    grid = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap, channels), 255, dtype=np.uint8)
    for i, image in enumerate(array):
        top, left = gap + i // columns * (height + gap), gap + i % columns * (width + gap)
        grid[top : top + height, left : left + width] = image
    return grid


def save_png(path: Path, array: np.ndarray) -> None:
    """Write (H, W), (H, W, 1) or (H, W, 3) uint8 as a PNG, as it is."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array).save(
            temporary, format="PNG"
        )
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def as_uint8(images: Tensor) -> np.ndarray:
    """(N, C, H, W) float in [0, 1], clamped to it, as (N, H, W, C) uint8."""
    return images.detach().cpu().clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()
