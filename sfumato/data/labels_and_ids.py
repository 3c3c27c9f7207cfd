"""Recognise labels and persons' ids in tables, and names of classes that may identify persons."""

import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np

from sfumato.data import tables
from sfumato.data.sources import tabled
from sfumato.data.sources.packed import unpacked
from sfumato.data.sources.source import Form
from sfumato.data.sources.splits import is_filing, split_of
from sfumato.data.tables import meaning
from sfumato.errors import ConfigError, DataError
from sfumato.settings.data import Groups

FOLDERS: Form = {"name": "imagefolder"}  # the layout of class folders
# Names of columns that contain persons' ids, in the form that `meaning` returns
PERSONS = re.compile(
    r"(anon\w*|study|source|dicom)?"
    r"(patient(en)?|person|subject|participant|case|individual|donor|volunteer)s?"
    r"(ids?|uid|no|nr|num|number|code|key|name|identifier|pseudonym)?"
    r"|groups?(ids?)?|mrns?|pids?|(medicalrecord|hospital|nhs|mrn)(id|no|nr|number)|ssn"
)
# Patterns to search for in column names. A column whose cells repeat may contain ids of persons if
# its name matches OF_PERSONS. If its name matches OF_THINGS, it may contain ids of things that
# belong to one person, such as sessions or specimens.
OF_PERSONS = re.compile(
    r"patient|pa[cz]i?ente?|subj|person|particip|proband|donor|volunteer|individual|client|user"
    r"|signer|speaker|writer|worker|owner|animal|identity|(^|_)(pat|sub|uid|hn)(_|$)"
)
OF_THINGS = re.compile(
    r"(^|_)(ids?|n[or]|nbr|num|number|codes?|keys?|hash|barcode|identifier|accession)(_|$)"
    r"|nummer|uid|lesion|session|study|series|exam|specimen|sample|slide|visit|video|clip|case|fall"
)
# Names of columns that contain labels, in the form that `meaning` returns
LABELLED = re.compile(
    r"(label|class|classname|category|target|diagnosis|dx|disease|pathology|finding|findinglabel)s?"
)
# Matches ids (long, zero-padded, hexadecimal), dates, names of persons ("Smith, John", DICOM's
# Smith^John) and e-mails
PERSONAL = re.compile(r"\d{3}|(?<!\d)0\d|\d[a-z]+\d|\d([-_. ]\d+){2}|[\^,@]", re.IGNORECASE)
# Cells that may stand for an uncertain or missing label, in lower case
UNCERTAIN = ("", "-1", "-1.0", "0.5", "u", "?", "nan", "na", "n/a", "none", "null", "unknown")
# Classes with few pictures may be persons. If there are more than MANY classes, "few" means fewer
# than FEW pictures per class. Otherwise it means fewer than LEAST.
MANY = 20
FEW = 50
LEAST = 10
FEWEST_THINGS = 5  # minimum number of different ids in a column of things (see OF_THINGS)
FEWEST_OTHERS = 10  # minimum number in any other column
MOST_EACH = 10  # if values have more pictures each, they may be hospitals or scanners


class Unclear(ConfigError):
    """The error for a decision that only the owner can make."""

    undecided = True


def is_person(name: str) -> bool:
    """Return whether a column contains persons' ids, by its name."""
    return bool(PERSONS.fullmatch(meaning(name)))


def is_label(name: str) -> bool:
    """Return whether a column contains labels, by its name."""
    return bool(LABELLED.fullmatch(meaning(name)))


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[\W_]+", "_", name).lower()


def groups_in(names: Iterable[str]) -> Groups | None:
    """Find the column, key or array with persons' ids by its name.

    Raises Unclear if there are several.
    """
    found = [name for name in names if is_person(name)]
    if len(found) > 1:
        raise Unclear(
            "persons' ids could be in {found}: choose one of them with {option.groups}",
            option="groups",
            found=" or ".join(found),
        )
    if not found:
        return None
    return Groups(column=found[0])


def main_table(path: Path) -> Path | None:
    """Return the table that decides the layout: the folder's, or the one of its first part."""
    return tables.table_path(path) or tables.table_in(split_of(path)[0][0])


def tables_read(path: Path) -> list[Path]:
    """Return the tables to read: the folder's table or, without one, the tables of its parts."""
    if table := tables.table_path(path):
        return [table]
    return [table for part in chain(*split_of(path)) if (table := tables.table_in(part))]


def cells_in(table: Path, column: str) -> list[str]:
    """Return the cells of a column as text, without leading or trailing spaces.

    Rows with too few or too many cells are left out. Returns [] if the file is not a table, or has
    no such column.
    """
    with suppress(DataError, ValueError):
        heads, rows = tables.cells_of(table)
        place = heads.index(column)
        cells = [row[place] for _, row in rows if len(row) == len(heads)]
        texts = [cell if (text := tables.cell_text(cell)) is None else text for cell in cells]
        return [str(text).strip() for text in texts]
    return []


def binary_columns(cells: Mapping[str, Sequence[str]]) -> tuple[list[str], list[str]]:
    """Return the columns of 0 and 1, and the columns that also have uncertain or empty cells.

    Both lists are empty if there are fewer than two such columns, or if the name of another column
    states that it contains the labels. cells: cells of each column.
    """
    others = {
        name: {*map(str.lower, own)} - {*tabled.VALUES}
        for name, own in cells.items()
        if {*tabled.VALUES} & {*own}
    }
    flags = [name for name, own in others.items() if own <= {*UNCERTAIN}]
    if len(flags) < 2 or {*filter(is_label, cells)} - ({*flags} - {tabled.LABEL}):
        return [], []
    return [name for name in flags if not others[name]], [name for name in flags if others[name]]


def check_certain(table: Path, cells: Mapping[str, Sequence[str]]) -> None:
    """Raise Unclear if columns of 0 and 1 also have uncertain or empty cells.

    cells: cells of each column of the table.
    """
    _, uncertain = binary_columns(cells)
    if uncertain:
        raise Unclear(
            "{table} has columns of 0 and 1 with uncertain or empty cells: {uncertain}. Write 0 or "
            "1 in each of these cells, or name only other columns of labels with {option.classes} "
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
        for name, own in cells.items()
        if label in (None, name) and any(tables.BETWEEN in cell for cell in own)
    ]
    if len(listing) != 1:
        return None
    labels = chain.from_iterable(map(tabled.labels_listed, cells[listing[0]]))
    names = tabled.classes_in([*labels])
    return FOLDERS | {"several": True, "classes": names, "label_column": listing[0]}


def check_agreement(path: Path, table: Path, columns: Sequence[str]) -> None:
    """Raise Unclear if the table and the folders define different classes.

    columns: columns whose names mean labels; if there are none, the images have several labels.
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
    """Count the pictures outside a folder with the name of their label in the table."""
    count = 0
    for table in tables_read(path):
        names = map(tables.plain_path, cells_in(table, tables.heads_of(table)[0]))
        cells = map(tables.plain_path, cells_in(table, column))  # none if the column is missing
        labels = dict(zip(names, cells, strict=False))
        for file in tabled.pictures_below(table.parent):
            place = tables.plain_path(str(file.relative_to(table.parent)))
            known = [place, *map(tables.plain_path, tables.names_of(file))]
            label = next((labels[name] for name in known if name in labels), None)
            count += label not in place.split("/")[:-1]
    return count


def repeated_ids(path: Path, label: str | None) -> tuple[str, bool] | None:
    """Find a column in the table of `path` whose cells repeat and may be persons' ids.

    Returns the column's name, and whether to propose it as the column of persons' ids. A column is
    proposed if its name means persons, or if its cells look like ids or names of persons. Returns
    the first such column, otherwise the first column that may contain persons' ids, otherwise None.

    Dates, years and sizes repeat too. So cells without a letter or a leading 0 are ignored, unless
    the column's name means persons, or things such as sessions (OF_THINGS).
    """
    telling = (
        r"(first|last|sur|full|given|family|nach|vor)?names?"
        r"|e?mails?(address)?|dob|(dateof)?birth(date|day)?|geburts(datum|tag)"
        r"|(tele|mobile)?phone(no|number)?|(home)?address"
    )
    other = None
    if table := main_table(unpacked(path)):
        for name in tables.heads_of(table)[1]:
            named = re.fullmatch(telling, meaning(name))
            person = named or OF_PERSONS.search(snake_case(name))
            thing = OF_THINGS.search(snake_case(name))
            cells = [
                cell
                for cell in cells_in(table, name)
                if re.search("." if person or thing else r"[^\W\d_]|^0", cell)
            ]
            ids = {*cells}
            frequent = MOST_EACH * len(ids) < len(cells)
            if name == label or len(ids) == len(cells) or (frequent and not named):
                continue
            if person or likeness(ids) == 2 or like_people(sorted(ids)):
                return name, True
            if len(ids) >= (FEWEST_THINGS if thing else FEWEST_OTHERS):
                other = other or (name, False)
    return other


def likeness(names: Collection[str]) -> int:
    """Rate how much names look like ids: 2 if most match PERSONAL, 1 if all contain digits,
    otherwise 0.
    """
    if sum(bool(PERSONAL.search(name)) for name in names) > len(names) / 2:
        return 2
    return int(all(re.search(r"\d", name) for name in names))


def like_people(names: Sequence[str]) -> bool:
    """Return whether names look like names of persons.

    There must be at least three names. Either all of them are initials such as TB, or two
    conditions are met: all look like Tony_Blair or Smith-John, and fewer than half of their words
    occur in several names.
    """
    if len(names) > 2 and all(re.fullmatch("[A-Z][A-Z]", name) for name in names):
        return True
    words = [re.findall(r"[^\W\d_]+", name) for name in names]
    every = list(chain.from_iterable(words))
    named = all(len(own) > 1 and all(map(str.istitle, own)) for own in words)
    return (
        named and len(words) > 2 and 2 * sum(every.count(word) > 1 for word in every) < len(every)
    )


def check_names(names: Sequence[str], counts: Sequence[int] = ()) -> None:
    """Raise Unclear if the names of classes, which would be published, may be names of persons, ids
    or kinds of files.

    counts: number of pictures of each class, if known.
    """
    alike = {" ".join(unicodedata.normalize("NFKC", name).casefold().split()) for name in names}
    reasons = {
        "two of them differ only in case or spaces, so they may be one class": (
            len(alike) < len(names)
        ),
        "one of them may mean a missing label": bool(alike & {"nan", "n/a", "na", "null"}),
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
    if why := [reason for reason, holds in reasons.items() if holds]:
        shown = [*names[:3], "…"] if len(names) > 3 else names
        raise Unclear(
            "the class names that were found would be published, but {why}. Name the classes with "
            "{option.classes} a,b,c, or use {option.classes} all to confirm that none of them "
            "identifies a person. Names found ({number} in total): {first}",
            option="classes",
            why=why[0],
            number=len(names),
            first=", ".join(shown),
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
