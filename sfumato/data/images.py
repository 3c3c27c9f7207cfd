"""Image sets in memory and on disk.

On disk: `images.npy`, uint8 (N, H, W, C), and `labels.npy`, int64 (N,) or, if images have several
labels, uint8 (N, classes) of 0 and 1. Both are memory-mapped when read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, BinaryIO, Self

import numpy as np

from sfumato.errors import DataError, explained
from sfumato.storage.arrays import read_array
from sfumato.storage.files import open_private, reading, replacing

if TYPE_CHECKING:  # functions that need torch import it, so plan and prepare do not load it
    import torch
    from torch import Tensor

Shape = tuple[int, int, int]  # channels, height, width
IMAGES = "images.npy"
LABELS = "labels.npy"
GROUPS = "groups.npy"
# File in the folder of the hold-out: for each image, its value in the column `data.compare_by`,
# such as the person's sex. The evaluation reports the accuracy for each value
COMPARED_FILE = "compared.npy"
GROUPS_REFUSED = (
    "contains one id per image, such as a patient's, but data.groups does not use these ids: set "
    "data.groups: {array: true} and privacy.unit: group. Remove the ids only if no person has "
    "several images"
)


@dataclass(frozen=True)
class ImageSet:
    """Labelled images.

    Args:
        images: (N, H, W, C) uint8, possibly a memory map.
        labels: (N,) int64 below len(classes), or (N, classes) uint8 of 0 and 1.
        classes: Names of the classes.
        groups: (N,) int64, equal for images of one person; None if each image is its own group.
            Private.
        compared: (N,) text, for a hold-out: value of each image in the column `data.compare_by`,
            such as the person's sex. None if no column is set. Local.
    """

    images: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    groups: np.ndarray | None = None
    compared: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> Shape:
        """Return the shape (C, H, W) that every image has."""
        height, width, channels = self.images.shape[1:]
        return channels, height, width

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Copy some images and their labels.

        Args:
            indices: (B,) integers.

        Returns:
            Images, (B, C, H, W) float32 in [0, 1], and labels, (B,) or (B, classes).
        """
        import torch

        indices = np.asarray(indices, dtype=np.int64)
        images, labels = (
            torch.from_numpy(np.array(array[indices])) for array in (self.images, self.labels)
        )
        return images.permute(0, 3, 1, 2).contiguous().float().div_(255), labels

    def some(self, most: int, seed: int) -> Tensor:
        """Choose at most `most` images at random. The choice depends on `seed`.

        Returns (n, C, H, W) uint8, in the order of the set.
        """
        import torch

        rows = np.sort(np.random.default_rng(seed).permutation(len(self))[:most])
        return torch.from_numpy(self.images[rows]).permute(0, 3, 1, 2).contiguous()

    def take(self, indices: np.ndarray) -> ImageSet:
        """Copy some images, with their labels, groups and values of `compared`.

        indices: (n,) integers, or a mask, (N,) bool.
        """
        arrays = {k: v[indices] for k, v in vars(self).items() if isinstance(v, np.ndarray)}
        return replace(self, **arrays)


class ImageWriter:
    """A writer of the files `images.npy`, `labels.npy` and, if images have groups, `groups.npy`.

    It writes one image at a time, so memory use is constant.

    The files are complete after the context ends. An exception leaves incomplete files, so use a
    temporary directory.
    """

    def __init__(
        self,
        directory: Path,
        shape: Shape,
        classes: tuple[str, ...],
        grouped: bool = False,
        several: bool = False,
    ) -> None:
        channels, height, width = shape
        self.row = (height, width, channels)
        self.count = 0
        self.label = (np.uint8, (len(classes),)) if several else (np.int64, ())
        directory.mkdir(parents=True, exist_ok=True)
        self.images = open_private(directory / IMAGES)
        self.labels = open_private(directory / LABELS)
        self.groups = open_private(directory / GROUPS) if grouped else None
        self.write_headers()

    def write_headers(self) -> None:
        # NumPy pads the header, so its length does not change while the first axis grows, and the
        # header can be rewritten in place.
        files = [
            (self.images, np.uint8, self.row),
            (self.labels, *self.label),
            (self.groups, np.int64, ()),
        ]
        for file, dtype, row in files:
            if file is not None:
                file.seek(0)
                write_header(file, np.dtype(dtype), (self.count, *row))

    def append(self, image: np.ndarray, label: int | np.ndarray, group: int | None = None) -> None:
        """Write one image, its label or labels, and its group, if any.

        image: (H, W, C) uint8; label: a number or, for several labels, (classes,) uint8 of 0 and 1.
        Raises DataError if a shape is wrong. The values of labels are checked when the set is
        loaded.
        """
        dtype, shape = self.label
        label = np.asarray(label, dtype)
        if image.dtype != np.uint8 or (image.shape, label.shape) != (self.row, shape):
            raise DataError(
                f"an image is {image.dtype} {image.shape} with a label of shape {label.shape}, "
                f"expected uint8 {self.row} with a label of shape {shape}"
            )
        self.images.write(image.tobytes())
        self.labels.write(label.tobytes())
        if self.groups is not None:
            self.groups.write(np.array(group, np.int64).tobytes())
        self.count += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self.images, self.labels, self.groups or nullcontext():
            if kind is None:
                self.write_headers()


def write_header(file: BinaryIO, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Write the header of a .npy file. The caller then writes the values, row by row."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def save_images(directory: Path, image_set: ImageSet) -> None:
    """Write `images.npy` and `labels.npy` into `directory`, each under a temporary name first."""
    check_images(image_set.images, image_set.labels, image_set.classes, directory)
    for name, array in ((IMAGES, image_set.images), (LABELS, image_set.labels)):
        with replacing(directory / name) as temporary, temporary.open("wb") as file:
            np.save(file, array, allow_pickle=False)


def load_images(
    directory: Path, classes: Iterable[str], *, grouped: bool = False, shape: Shape | None = None
) -> ImageSet:
    """Load the set in `directory`, memory-mapped read-only and validated.

    grouped: whether the set is expected to have groups; shape: expected (C, H, W).

    Raises DataError if the set is missing or damaged, or if its groups or its shape are not as
    expected.
    """
    if (directory / GROUPS).exists() and not grouped:
        raise DataError(f"{directory / GROUPS} {GROUPS_REFUSED}.")
    images, labels = (load_array(directory / name) for name in (IMAGES, LABELS))
    check_images(images, labels, names := tuple(classes), directory)
    height, width, channels = images.shape[1:]
    if shape is not None and (channels, height, width) != tuple(shape):
        raise DataError(
            f"the images in {directory / IMAGES} have the shape (C, H, W) = "
            f"{(channels, height, width)}, expected {shape}: rerun the stage that writes "
            "this file"
        )
    groups = load_array(directory / GROUPS) if grouped else None
    if groups is not None and (groups.dtype != np.int64 or groups.shape != labels.shape[:1]):
        raise DataError(
            f"{directory / GROUPS} is {groups.dtype} {groups.shape}, expected int64 "
            f"{labels.shape[:1]}: rerun the stage that writes the set."
        )
    return ImageSet(images, labels, names, groups)


def load_array(path: Path) -> np.ndarray:
    if not path.is_file():
        raise DataError(f"{path} is missing: run the stage that writes it.")
    problem = f"{path} is not a complete .npy file"
    with (
        explained(DataError, lambda error: f"{problem} ({error}): rerun the stage that writes it."),
        reading(path),
    ):
        return read_array(path)


def check_images(
    images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], directory: Path
) -> None:
    """Raise DataError unless the arrays are valid images and labels of `classes`."""
    if (
        images.dtype != np.uint8
        or images.ndim != 4
        or images.shape[3] not in (1, 3)
        or 0 in images.shape[1:]
    ):
        expected = "uint8 (N, H, W, C) with C 1 or 3"
        raise DataError(
            f"{directory / IMAGES} is {images.dtype} {images.shape}, expected {expected}."
        )
    if (labels.dtype, labels.shape[1:]) not in ((np.int64, ()), (np.uint8, (len(classes),))):
        expected = f"int64 (N,), or uint8 (N, {len(classes)}) for several labels"
        raise DataError(
            f"{directory / LABELS} is {labels.dtype} {labels.shape}, expected {expected}."
        )
    if len(labels) != len(images):
        raise DataError(
            f"{directory / IMAGES} contains {len(images)} images, but {LABELS} contains "
            f"{len(labels)} labels: expected one label per image."
        )
    check_labels(labels, classes, directory / LABELS)


def check_labels(labels: np.ndarray, classes: tuple[str, ...], path: Path) -> None:
    """Raise DataError if a label in the file `path` is not the number of a class or, for several
    labels per image, if an entry is neither 0 nor 1.
    """
    if labels.ndim == 2:
        if labels.size and not (labels.min() >= 0 and labels.max() <= 1):
            raise DataError(
                f"{path} has labels other than 0 and 1: for each image, write 1 for a label that "
                "it has, and 0 for any other label."
            )
    elif len(labels) and not (labels.min() >= 0 and labels.max() < len(classes)):
        expected = f"0..{len(classes) - 1} for {len(classes)} classes"
        raise DataError(f"{path} has labels {labels.min()}..{labels.max()}, expected {expected}.")


def per_class(labels: np.ndarray, classes: int) -> np.ndarray:
    """Count the images with each label. Returns (classes,) int64.

    labels: (N,) int64 or, for several labels per image, (N, classes) uint8.
    """
    if labels.ndim == 2:
        return labels.sum(axis=0, dtype=np.int64)
    return np.bincount(labels, minlength=classes)


def having(labels: np.ndarray, label: int) -> np.ndarray:
    """Return whether each image has the label, (N,) bool."""
    if labels.ndim == 2:
        return labels[:, label] == 1
    return labels == label


def strata(labels: np.ndarray) -> np.ndarray:
    """Return the stratum of each image in a stratified split, (N,) int64.

    The stratum is the image's label or, if images have several labels, 0 for all images.
    """
    if labels.ndim == 1:
        return labels
    return np.zeros(len(labels), dtype=np.int64)


def as_uint8(images: Tensor) -> np.ndarray:
    """Convert (N, C, H, W) float, clamped to [0, 1], to (N, H, W, C) uint8."""
    return as_bytes(images).permute(0, 2, 3, 1).contiguous().numpy()


def inference_batch_size(shape: Sequence[int]) -> int:
    """Return how many images of a shape to pass through a network at a time.

    The number is 64, or up to 1024 for small images.
    """
    return max(64, min(1024, 2**20 // math.prod(shape)))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a batch to `device`. A copy from the CPU to CUDA is asynchronous."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def as_bytes(images: Tensor) -> Tensor:
    """Convert (N, C, H, W) float, clamped to [0, 1], to uint8 on the CPU."""
    return images.detach().cpu().clamp(0, 1).mul(255).round().byte()


def as_floats(images: Tensor) -> Tensor:
    """Convert uint8 to float32 in [0, 1], as the inverse of `as_bytes`; leave float32 unchanged."""
    import torch

    if images.dtype == torch.uint8:
        return images.float().div_(255)
    return images.float()


def room(count: int, shape: Sequence[int], folder: Path | None = None) -> Tensor:
    """Allocate (count, C, H, W) uint8 in memory or, if `folder` is given, in a file in `folder`.

    The file has no name, so it disappears when the tensor is freed.
    """
    import torch

    size = count * math.prod(shape)
    if folder is None or not size:
        return torch.empty(count, *shape, dtype=torch.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # raises OSError now if the disk is full
            os.posix_fallocate(file.fileno(), 0, size)
        file.truncate(size)
        return torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8).view(
            count, *shape
        )
