"""Other forms of an image set for other programs: one `.npz` archive, and PNGs in a folder per class with a table."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sfumato.images import ImageSet, replace_file, save_png

NPZ, PNG, METADATA = "images.npz", "png", "metadata.csv"


def save_npz(path: Path, image_set: ImageSet) -> None:
    """One compressed archive of `images` (N, H, W, C) uint8, `labels` (N,) int64 and `classes` (M,) strings; the same bytes each time."""
    archive = io.BytesIO()
    np.savez_compressed(archive, images=image_set.images, labels=image_set.labels, classes=np.array(image_set.classes, dtype=np.str_))
    replace_file(path, archive.getvalue())


def save_png_folders(directory: Path, image_set: ImageSet) -> None:
    """One PNG an image, `<class>/<index>.png`, and `metadata.csv` with a row for each: file_name, label, class.

    Readers that number the folders by their sorted names, as torchvision's ImageFolder does, find the labels of the set, provided
    each class has an image.
    """
    folders = folder_names(image_set.classes)
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("file_name", "label", "class"))
    for i, (image, label) in enumerate(zip(image_set.images, image_set.labels, strict=True)):
        name = f"{folders[label]}/{i:06d}.png"
        save_png(directory / name, image)
        writer.writerow((name, int(label), image_set.classes[label]))
    replace_file(directory / METADATA, table.getvalue().encode())


def folder_names(classes: Sequence[str]) -> tuple[str, ...]:
    """A folder for each class, named after it; all begin with the label where names alone would sort otherwise, clash or be no names."""
    safe = [re.sub(r'[\x00-\x1f/\\:*?"<>|]', "_", name).strip(" .") for name in classes]
    alike = {name.casefold() for name in safe}
    if all(safe) and safe == sorted(safe) and len(alike) == len(safe):
        return tuple(safe)
    digits = len(str(len(classes) - 1))
    return tuple(f"{label:0{digits}d}-{name}".rstrip("-") for label, name in enumerate(safe))
