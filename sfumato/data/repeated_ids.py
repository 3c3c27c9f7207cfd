"""Rate how likely the cells of a column are ids of persons, by their form and the column's name."""

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from sfumato.data.dates import ANY_DATE
from sfumato.data.groups import NO_ID, is_unclear, plain_id
from sfumato.data.names import Column
from sfumato.data.tables import meaning

# Patterns to search for in the names of columns with repeated cells. If OF_PERSONS matches a name,
# the cells may be ids of persons. If OF_THINGS matches, they may be ids of things that belong to
# one person, such as sessions or specimens.
OF_PERSONS = re.compile(
    r"patient|pa[cz]i?ente?|subj|person|particip|proband|donor|volunteer|individual|client|user"
    r"|signer|speaker|writer|worker|owner|animal|identity|mrn|(^|_)(pat|sub|uid|hn)(_|$)"
)
# Columns of persons who may have labelled the images
OF_STAFF = re.compile(r"user|worker|owner|client")
# Columns of persons' names, addresses and birthdays, in the form that `meaning` returns
TELLING = re.compile(
    r"(first|last|sur|full|given|family|nach|vor)?names?"
    r"|e?mails?(address)?|dob|(dateof)?birth(date|day)?|geburts(datum|tag)"
    r"|(tele|mobile)?phone(no|number)?|(home)?address"
)
OF_THINGS = re.compile(
    r"(^|_)(ids?|n[or]|nbr|num|number|codes?|keys?|hash|barcode|identifier|accession)(_|$)"
    r"|nummer|uid|lesion|session|study|series|exam|specimen|sample|slide|visit|video|clip|case|fall"
)
# Columns of dates and times, in the form that `meaning` returns
OF_TIME = re.compile(r"(?<!candi)(date|time|datum|zeit)(stamp)?s?$")
# Matches ids (long, zero-padded, hexadecimal), dates, names of persons ("Smith, John", DICOM's
# Smith^John) and e-mails
PERSONAL = re.compile(r"\d{3}|(?<!\d)0\d|\d[a-z]+\d|\d([-_. ]\d+){2}|[\^,@]", re.IGNORECASE)
# Matches dates, months such as 201905, and times
MOMENT = re.compile(
    rf"({ANY_DATE}\D{{0,4}})?(\d\d?:\d\d\S*)?|(19|20)\d\d(0[1-9]|1[0-2])", re.IGNORECASE
)
# Matches dates, times, numbers with decimals, and ages as in DICOM (045Y)
MEASURED = re.compile(rf"{MOMENT.pattern}|[-+]?\d*[.,]\d+(e[-+]?\d+)?|\d{{3}}[DWMY]", re.IGNORECASE)
# Matches cells that may be ids, whatever the column's name is: cells with a letter, a leading 0 or,
# as in 943 476 5919, at least nine digits in three or more groups
ID_FORM = re.compile(r"[^\W\d_]|^0\d|^(?=(\D?\d){9})\d+([-. /])\d+(\2\d+)+$")
# Cells that may stand for an uncertain or missing label, in lower case
UNCERTAIN = ("", "-1", "-1.0", "0.5", "u", "?", "nan", "na", "n/a", "none", "null", "unknown")
# Minimum number of different ids in a column with a name that matches OF_PERSONS or OF_THINGS
FEWEST_THINGS = 5
FEWEST_OTHERS = 10  # minimum number in any other column
MOST_EACH = 10  # if values have more pictures each, they may be hospitals or scanners
SHORT = 4  # ages, years, sizes and scores have at most this many digits


def snake_case(name: str) -> str:
    """Write a name in lower case, without accents, and with "_" between its words."""
    unaccented = re.sub("[\u0300-\u036f]", "", unicodedata.normalize("NFKD", name))
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[\W_]+", "_", unaccented).lower()


def repeated_ids(
    columns: Mapping[str, Sequence[str]], label: str | None
) -> tuple[str, bool] | None:
    """Find a column with values that repeat and may be persons' ids.

    Returns its name, and whether to propose it as the column of persons' ids, or None if there is
    no such column. If several columns have the highest rating (see `rate_ids`), the first is taken.

    columns: cells of each column; label: the column with the labels.
    """
    ratings = {name: rate_ids(name, cells) for name, cells in columns.items() if name != label}
    best = max(ratings, key=ratings.__getitem__, default=None)
    if best is None or not ratings[best]:
        return None
    return best, ratings[best] == 2


def rate_ids(name: str, cells: Sequence[str]) -> int:
    """Rate how likely it is that the cells of a column repeat and are ids of persons.

    Returns 2 if the column can be proposed: its name stands for persons (OF_PERSONS or TELLING), or
    its cells look like ids or names of persons. Returns 1 if only the owner can decide, and
    otherwise 0.

    Dates, years and sizes repeat too. So only cells that match ID_FORM are considered, with three
    exceptions: the column's name stands for persons, the name stands for things such as sessions
    (OF_THINGS), or the cells are numbers with the form of ids. Dates are considered only if the
    name stands for persons. If values have many pictures each, they may be ages, so they must look
    like ids even in a column of persons, unless the column's name matches TELLING.
    """
    personal = TELLING.fullmatch(meaning(name))
    person = personal or OF_PERSONS.search(snake_case(name))
    thing = OF_THINGS.search(snake_case(name))
    cells = known_cells(cells)
    if not person and OF_TIME.search(meaning(name)):
        return 0
    if not (person or are_id_numbers(cells)):
        id_cells = {
            cell
            for cell in {*cells}
            if not MOMENT.fullmatch(cell)
            and (thing or (ID_FORM.search(cell) and not MEASURED.fullmatch(cell)))
        }
        cells = [cell for cell in cells if cell in id_cells]
    ids = {*cells}
    frequent = MOST_EACH * len(ids) < len(cells) and not personal
    if len(ids) == len(cells) or (frequent and not look_like_ids(name, cells)):
        return 0
    if person or (not frequent and (likeness(ids) == 2 or like_people(sorted(ids)))):
        return 2
    if thing and not frequent:
        return int(len(ids) >= FEWEST_THINGS)
    # Sites, scanners and batches have the form of ids too, but are few and have many pictures each
    return int(len(ids) >= FEWEST_OTHERS * (1 + frequent))


def known_cells(cells: Sequence[str]) -> list[str]:
    """Return the cells without empty or uncertain ones; 17.0 becomes 17."""
    return [re.sub(r"(?<=\d)\.0+$", "", cell) for cell in cells if cell.lower() not in UNCERTAIN]


def are_id_numbers(cells: Sequence[str]) -> bool:
    """Return whether nearly all cells are numbers that repeat and have the form of ids.

    Numbers with more than SHORT digits count as ids, unless they are dates or rounded to tens, as
    amounts and times often are. Shorter numbers count only if there are large gaps between them.
    They could also be sizes, and a common size has many pictures. So at least FEWEST_OTHERS of them
    must repeat, and none may have more than MOST_EACH pictures.
    """
    numbers = [cell for cell in cells if re.fullmatch(r"\d{1,40}", cell)]
    if len(numbers) <= 0.9 * len(cells):  # also true if there are no cells
        return False
    column = Column(values=numbers, pattern="", kind="number")
    digits = [*map(len, column.counts)]
    repeated = [count for count in column.counts.values() if count > 1]
    return (
        column.repeated
        and (column.sparse or min(digits) > SHORT)
        and (max(digits) > SHORT or (len(repeated) >= FEWEST_OTHERS and max(repeated) <= MOST_EACH))
        and column.step < 10
        and not all(map(MOMENT.fullmatch, column.counts))
    )


def look_like_ids(name: str, cells: Sequence[str]) -> bool:
    """Return whether a column contains ids, not ages, dates or other facts about a person.

    There must be at least FEWEST_THINGS different cells. In addition, the whole name of the column
    must match OF_PERSONS, or the cells must have the form of ids.
    """
    ids = {*cells}
    if len(ids) < FEWEST_THINGS:
        return False
    if OF_PERSONS.fullmatch(snake_case(name)) or are_id_numbers(cells):
        return True
    measured = all(cell.isdecimal() or MEASURED.fullmatch(cell) for cell in ids)
    return not measured and (likeness(ids) == 2 or like_people(sorted(ids)))


def coarser_ids(columns: Mapping[str, Sequence[str]], id_column: str) -> list[str]:
    """Return the columns of persons' ids in which one id belongs to several ids of `id_column`.

    The column `id_column` may then contain ids of examinations, although its name stands for
    persons.
    """
    return [
        name
        for name, cells in columns.items()
        if name != id_column
        and OF_PERSONS.search(snake_case(name))
        and look_like_ids(name, known_cells(cells))
        and are_coarser(cells, columns[id_column], bool(OF_STAFF.search(snake_case(name))))
    ]


def are_coarser(cells: Sequence[str], ids: Sequence[str | None], staff: bool = False) -> bool:
    """Return whether one of `cells` belongs to several of `ids`.

    Cells that often mean an unknown person do not count.

    cells, ids: values of each image; staff: whether the cells may name staff, such as annotators.
    If such cells have more than MOST_EACH ids each on average, the result is False.
    """
    clear = {
        cell
        for cell in {*cells}
        if (form := plain_id(cell)) not in NO_ID and not is_unclear(form, (), in_names=False)
    }
    pairs = {
        (cell, identifier)
        for cell, identifier in zip(cells, ids, strict=False)
        if identifier and cell in clear
    }
    persons = len({cell for cell, _ in pairs})
    if staff and len(pairs) > MOST_EACH * persons:
        return False
    return len(pairs) > persons >= FEWEST_THINGS


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
    word_counts = Counter(chain.from_iterable(words))
    shared = sum(count for count in word_counts.values() if count > 1)
    title_case = all(len(parts) > 1 and all(map(str.istitle, parts)) for parts in words)
    return title_case and len(words) > 2 and 2 * shared < word_counts.total()
