"""A folder of pictures with several labels each: a table has a column for each label, or one that lists them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from sfumato.data.groups import rows_of_files
from sfumato.data.sources.deep import is_dicom
from sfumato.data.sources.source import Listing, Place, Request
from sfumato.data.sources.tabled import LABEL, PERSONS, required_classes
from sfumato.data.tables import BETWEEN, FILE, METADATA, classes_in, columns_of, read_table
from sfumato.errors import DataError, PrivateError

TABLES = ("labels.csv", *METADATA)
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


def table_of(root: Path) -> Path | None:
    return next((root / name for name in TABLES if (root / name).is_file()), None)


def list_labels(request: Request) -> Listing:
    """Each picture of a folder with its labels, (classes,) uint8 of 0 and 1, and its person's id if a column has it.

    The labels are the columns that `request.classes` names, by default all others, or what `label_column` lists. The
    names are those of the columns or of `request.classes`, so they do not depend on the images. Raises DataError, or
    PrivateError where one row is at fault.
    """
    root, column, table = request.required_path(), request.label_column, table_of(request.required_path())
    person = request.groups.column if request.groups is not None else None
    if table is None:
        wanted = f"{' or '.join(TABLES)}, with the column {FILE} and one of 0 and 1 for each label"
        raise DataError(f"data.labels: several, but data.path={root} is no folder with {wanted}: write that table.")
    files = pictures_below(root)
    if link := next((file for file in files if not file.resolve().is_relative_to(root.resolve())), None):
        raise PrivateError(f"{link} is a link out of {root}: copy what it links to in its place")
    others = [name for name in columns_of(table) if name not in (FILE, person)]
    classes = tuple(required_classes(request.classes) if column else request.classes or others)
    asked = (FILE, *([column] if column else classes), *([person] if person else ()))
    found: list[Place] = []
    ids: list[str] = []
    for file, cells in zip(files, rows_of_files(table, str(table), asked, files, root), strict=True):
        if person:
            ids.append(cells.pop())
        if column and not (listed := {*parts_of(cells[0])}) <= {*classes}:
            raise PrivateError(f"{table} lists a label that data.classes does not name: name all of them")
        if not column and not {*cells} <= {*VALUES}:
            raise PrivateError(
                f"{table} has a cell that is neither 0 nor 1 in a column of a label: write one of them for each "
                "picture, unsure ones too, and name the columns of the labels in data.classes: [a, b, …]"
            )
        row = [name in listed for name in classes] if column else [VALUES[cell] for cell in cells]
        found.append((file, np.array(row, dtype=np.uint8)))
    return Listing(classes, found, None, [], ids if person else None)


def parts_of(cell: str) -> list[str]:
    """The labels that a cell lists."""
    return [part.strip() for part in cell.split(BETWEEN) if part.strip()]


def several_in(root: Path, label: str | None) -> tuple[tuple[str, ...], str | None, str | None] | None:
    """The labels that a folder's table gives its pictures, if several each; the column that lists them, and of ids.

    Two columns of 0 and 1 at least; or one whose cells list labels, such as "effusion|mass". label: that column, if the
    owner names it. The names follow from the images where they are listed: only an owner may make them public.
    """
    table = table_of(root)
    if table is None or (
        label is None and table.name != TABLES[0] and sum(part.is_dir() for part in root.iterdir()) > 1
    ):
        return None  # class folders win over a table of another name
    cells: dict[str, list[str]] = {}
    for name in [name for name in columns_of(table) if name != FILE]:
        with suppress(PrivateError):  # of a column that is of no use here, such as an age
            cells[name] = [cell for _, (cell,) in read_table(table, [name], str(table))]
    person = next((name for name in cells if name.lower() in PERSONS and name != label), None)
    binary = [name for name in cells if name != person and {*cells[name]} <= {*VALUES}]
    listing = [n for n in cells if label in (None, n) and n != person and any(BETWEEN in cell for cell in cells[n])]
    if label is None and len(binary) > 1 and LABEL not in cells:
        return tuple(binary), None, person
    if len(listing) != 1:
        return None
    names = classes_in([part for cell in cells[listing[0]] for part in parts_of(cell)])
    return names, listing[0], person
