"""A folder of pictures with several labels each: `labels.csv` or `metadata.csv` has a column for each label."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sfumato.data.groups import rows_of_files
from sfumato.data.sources.deep import is_dicom
from sfumato.data.sources.source import Place
from sfumato.data.tables import columns_of
from sfumato.errors import DataError, PrivateError

TABLES = ("labels.csv", "metadata.csv")
FILE = "file_name"
VALUES = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}


def pictures_below(root: Path) -> list[Path]:
    """Every picture in a folder and below, in the order of names, without hidden ones."""
    from PIL.Image import registered_extensions

    known, found = registered_extensions(), []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(folder, name) for name in sorted(files) if not name.startswith("."))
        found += [path for path in paths if path.is_file() and (path.suffix.lower() in known or is_dicom(path))]
    return found


def labels_of_table(root: Path, columns: Sequence[str] | None) -> tuple[tuple[str, ...], list[Place]]:
    """The names of the labels, and each picture of a folder with its labels, (classes,) uint8 of 0 and 1.

    columns: of the labels, in their order; None: all but `file_name`. The names are those of the columns, so they do
    not depend on the images. Raises DataError, or PrivateError where one row is at fault.
    """
    table = next((root / name for name in TABLES if (root / name).is_file()), None)
    if table is None:
        wanted = f"{' or '.join(TABLES)}, with the column {FILE} and one of 0 and 1 for each label"
        raise DataError(f"data.labels: several, but data.path={root} is no folder with {wanted}: write that table.")
    files = pictures_below(root)
    if link := next((file for file in files if not file.resolve().is_relative_to(root.resolve())), None):
        raise PrivateError(f"{link} is a link out of {root}: copy what it links to in its place")
    classes = tuple(columns or (name for name in columns_of(table) if name != FILE))
    found: list[Place] = []
    for file, cells in zip(files, rows_of_files(table, str(table), (FILE, *classes), files, root), strict=True):
        if not {*cells} <= {*VALUES}:
            raise PrivateError(
                f"{table} has a cell that is neither 0 nor 1 in a column of a label: write one of them for each "
                "picture, unsure ones too, and name the columns of the labels in data.classes: [a, b, …]"
            )
        found.append((file, np.array([VALUES[cell] for cell in cells], dtype=np.uint8)))
    return classes, found
