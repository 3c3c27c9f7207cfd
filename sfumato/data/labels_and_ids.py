"""Recognise labels and persons' ids in tables, and names of classes that may identify persons."""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np

from sfumato.data import tables
from sfumato.data.repeated_ids import PERSONAL, UNCERTAIN, coarser_ids, like_people, likeness
from sfumato.data.sources import tabled
from sfumato.data.sources.npz import AS_PLAIN_ARRAYS
from sfumato.data.sources.packed import arrays_in, unpacked
from sfumato.data.sources.source import Form
from sfumato.data.sources.splits import is_filing, split_of
from sfumato.data.tables import meaning
from sfumato.errors import UNREADABLE, ConfigError, DataError
from sfumato.settings.data import Groups

FOLDERS: Form = {"name": "imagefolder"}  # the layout of class folders
# Names of columns that contain persons' ids, in the form that `meaning` returns
PERSONS = re.compile(
    r"(anon\w*|study|source|dicom)?"
    r"(patient(en)?|person|subject|participant|case|individual|donor|volunteer)s?"
    r"(ids?|uid|no|nr|num|number|code|key|name|identifier|pseudonym)?"
    r"|groups?(ids?)?|mrns?|pids?|(medicalrecord|hospital|nhs|mrn)(id|no|nr|number)|ssn"
)
# Names of columns that contain labels, in the form that `meaning` returns
LABELLED = re.compile(
    r"(label|class|classname|category|target|diagnosis|dx|disease|pathology|finding|findinglabel)s?"
)
# Classes with few pictures may be persons. If there are more than MANY classes, "few" means fewer
# than FEW pictures per class. Otherwise it means fewer than LEAST.
MANY = 20
FEW = 50
LEAST = 10


class Unclear(ConfigError):
    """The error for a decision that only the owner can make."""

    undecided = True


def is_person(name: str) -> bool:
    """Return whether a column contains persons' ids, by its name."""
    return bool(PERSONS.fullmatch(meaning(name)))


def is_label(name: str) -> bool:
    """Return whether a column contains labels, by its name."""
    return bool(LABELLED.fullmatch(meaning(name)))


def groups_in(columns: Mapping[str, Sequence[str]]) -> Groups | None:
    """Find the column, key or array with persons' ids by its name.

    columns: cells of each column, key or array.

    Raises Unclear if there are several, or if another column has coarser ids (see `coarser_ids`).
    """
    candidates = [name for name in columns if is_person(name)]
    if len(candidates) == 1:
        candidates += coarser_ids(columns, candidates[0])
    if len(candidates) > 1:
        raise Unclear(
            "persons' ids could be in {found}: choose one of them with {option.groups}",
            option="groups",
            found=" or ".join(candidates),
        )
    if not candidates:
        return None
    return Groups(column=candidates[0])


def main_table(path: Path) -> Path | None:
    """Return the table that decides the layout: the folder's table or, without one, the table of
    its first training folder.
    """
    return tables.table_path(path) or tables.table_in(split_of(path)[0][0])


def tables_read(path: Path) -> list[Path]:
    """Return the tables to read: the folder's table or, without one, the tables of its parts."""
    if table := tables.table_path(path):
        return [table]
    return [table for part in chain(*split_of(path)) if (table := tables.table_in(part))]


def columns_of(path: Path) -> dict[str, list[str]]:
    """Return the cells of each column that may contain persons' ids, as text.

    These are the columns of the table beside the pictures, except file names. For tar files, they
    are the keys of the .json, and for an .npz, the arrays of one number or text per image.
    """
    path = unpacked(path)
    if path.suffix.lower() == ".npz":
        return columns_of_arrays(path)
    if table := main_table(path):
        file_column = tables.heads_of(table)[0]
        return {name: cells for name, cells in columns_in(table).items() if name != file_column}
    return columns_of_samples(path)


def columns_in(table: Path) -> dict[str, list[str]]:
    """Return the cells of each column as text, without leading or trailing spaces.

    Rows with too few or too many cells are left out. Returns {} if the file is not a table.
    """
    with suppress(DataError, ValueError):
        heads, rows = tables.cells_of(table)
        complete = [row for _, row in rows if len(row) == len(heads)]
        return {name: [plain_cell(row[heads.index(name)]) for row in complete] for name in heads}
    return {}


def plain_cell(cell: object) -> str:
    text = tables.cell_text(cell)
    return str(cell if text is None else text).strip()


def columns_of_arrays(path: Path) -> dict[str, list[str]]:
    columns: dict[str, list[str]] = {}
    for name, array in arrays_in(path, AS_PLAIN_ARRAYS).items():
        cells = columns.setdefault(re.sub("^(train|val|test)_", "", name), [])
        if array.ndim and array.size == len(array):
            cells.extend(map(plain_cell, array.ravel().tolist()))
    return columns


def columns_of_samples(path: Path) -> dict[str, list[str]]:
    """Return the values of each key in the .json of the samples, "" for a missing key.

    Some programs write a different key into each .json. So keys that fewer than a tenth of the
    samples have are left out, unless their names are words for persons or ids.
    """
    rows: list[dict[str, object]] = []
    with suppress(DataError):
        for sample in chain.from_iterable(map(tabled.samples_in, tabled.shards_of(path))):
            with suppress(*UNREADABLE):
                rows.append(tabled.json_of(sample))
    counts = Counter(chain.from_iterable(rows))
    names = [name for name, count in counts.items() if 10 * count > len(rows) or is_person(name)]
    return {name: [plain_cell(row.get(name)) for row in rows] for name in names}


def binary_columns(cells: Mapping[str, Sequence[str]]) -> tuple[list[str], list[str]]:
    """Return the columns of 0 and 1, and the columns that also have uncertain or empty cells.

    Both lists are empty if there are fewer than two such columns, or if another column contains the
    labels, by its name. cells: cells of each column.
    """
    extras = {
        name: {*map(str.lower, values)} - {*tabled.VALUES}
        for name, values in cells.items()
        if {*tabled.VALUES} & {*values}
    }
    flags = [name for name, values in extras.items() if values <= {*UNCERTAIN}]
    if len(flags) < 2 or {*filter(is_label, cells)} - ({*flags} - {tabled.LABEL}):
        return [], []
    return [name for name in flags if not extras[name]], [name for name in flags if extras[name]]


def check_certain(table: Path, cells: Mapping[str, Sequence[str]]) -> None:
    """Raise Unclear if columns of 0 and 1 also have uncertain or empty cells.

    cells: cells of each column of the table.
    """
    _, uncertain = binary_columns(cells)
    if uncertain:
        raise Unclear(
            "{table} has columns of 0 and 1 with uncertain or empty cells: {uncertain}. Write 0 or "
            "1 in each of these cells, or name only columns without such cells: {option.classes} "
            "a,b,c. If a single column contains all labels, name it with {option.label_column}",
            option="classes",
            table=table,
            uncertain=", ".join(uncertain),
        )


def several_in(cells: Mapping[str, Sequence[str]], label: str | None) -> Form | None:
    """Return the fields of a Request for a table with several labels per picture.

    Such a table has at least two columns of 0 and 1, or a column of lists such as "effusion|mass".
    Returns None for any other table. With a column of lists, the class names are the labels that
    occur. They depend on the images, so only the owner may publish them.

    cells: cells of each column of the table; label: the column of lists, if the owner named it.
    """
    binary, _ = binary_columns(cells)
    if label is None and len(binary) > 1:
        return FOLDERS | {"several": True, "classes": tuple(binary)}
    listing = [
        name
        for name, values in cells.items()
        if label in (None, name) and any(tables.BETWEEN in cell for cell in values)
    ]
    if len(listing) != 1:
        return None
    labels = chain.from_iterable(map(tabled.labels_listed, cells[listing[0]]))
    names = tabled.classes_in([*labels])
    return FOLDERS | {"several": True, "classes": names, "label_column": listing[0]}


def check_agreement(path: Path, table: Path, columns: Sequence[str]) -> None:
    """Raise Unclear if the table and the folders define different classes.

    columns: columns of labels, recognised by their names. If there are none, the table is treated
    as different for all images.
    """
    different = min((count_different(path, name) for name in columns), default="all")
    if different:
        raise Unclear(
            "in {path}, both the table {table} and the folders could define the classes, and "
            "they differ for {different} images. To use the table, give {option.label_column} "
            "COLUMN or, if images have several labels, rename the table to labels.csv. To use "
            "the folders, give {option.classes} a,b,c or {option.classes} all",
            option="classes",
            path=path,
            table=table.name,
            different=different,
        )


def unclear_label(table: Path, heads: Sequence[str], proposed: str | None = None) -> Unclear:
    """Return the error for a table in which only the owner can choose the column of labels."""
    return Unclear(
        "{table} has the columns {heads}: set {option.label_column} to the column that contains "
        "the labels. The labels become class names, which are published",
        option="label_column",
        proposed=proposed,
        table=table,
        heads=", ".join(heads),
    )


def count_different(path: Path, column: str) -> int:
    """Count the pictures for which no parent folder has the name of the label in the table."""
    count = 0
    for table in tables_read(path):
        columns = columns_in(table)
        names = map(tables.plain_path, columns.get(tables.heads_of(table)[0], []))
        cells = map(tables.plain_path, columns.get(column, []))
        labels = dict(zip(names, cells, strict=False))
        for file in tabled.pictures_below(table.parent):
            relative_path = tables.plain_path(str(file.relative_to(table.parent)))
            possible_names = [relative_path, *map(tables.plain_path, tables.names_of(file))]
            label = next((labels[name] for name in possible_names if name in labels), None)
            count += label not in relative_path.split("/")[:-1]
    return count


def check_names(names: Sequence[str], counts: Sequence[int] = ()) -> None:
    """Raise Unclear if the names of classes, which would be published, may be names of persons, ids
    or kinds of files.

    counts: number of pictures of each class, if known.
    """
    folded_names = [unicodedata.normalize("NFKC", name).casefold() for name in names]
    spellings = {
        " ".join(re.sub(r"(?<=\d)\.0+$", "", name.strip()).split()) for name in folded_names
    }
    reasons = {
        "two of them differ only in case, spaces or a final .0, so they may be one class": (
            len(spellings) < len(names)
        ),
        "one of them (nan, n/a, na or null) may mean a missing label": (
            bool(spellings & {"nan", "n/a", "na", "null"})
        ),
        "some of them look like names for parts of a set (such as train or part_1) or for kinds of "
        "files (such as masks)": any(map(is_filing, names)),
        "some of them look like ids, dates or names of persons": (
            any(map(PERSONAL.search, names)) or like_people(names)
        ),
        "there are many, and they contain numbers": len(names) > MANY and likeness(names) > 0,
        "most classes have few pictures, as if each class were one person": (
            np.median(counts or FEW) < (FEW if len(names) > MANY else LEAST)
        ),
    }
    if problems := [reason for reason, holds in reasons.items() if holds]:
        examples = [*names[:3], "…"] if len(names) > 3 else names
        raise Unclear(
            "the class names that were found would be published, but {why}. Name the classes with "
            "{option.classes} a,b,c, or use {option.classes} all to confirm that none of them "
            "identifies a person. Names found ({number} in total): {first}",
            option="classes",
            why=problems[0],
            number=len(names),
            first=", ".join(examples),
        )


def check_found(form: Form, names: Sequence[str], counts: Sequence[int]) -> None:
    """Raise Unclear if `check_names` does, or if some class folders have no pictures.

    The names of such folders would be published too.

    form: fields of the Request; counts: number of pictures of each class.
    """
    empty = [name for name, count in zip(names, counts, strict=True) if not count]
    if form == FOLDERS and empty and any(counts):
        raise Unclear(
            "folders without pictures ({empty}) would be published as class names: remove them, or "
            "use {option.classes} all to keep them as classes",
            option="classes",
            empty=", ".join(empty[:5]),
        )
    check_names(names, counts)
