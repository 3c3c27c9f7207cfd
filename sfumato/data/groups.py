"""Find the person of each image. Ids are private, so messages contain no id."""

import functools
import re
import unicodedata
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import registered_extensions

from sfumato.data.deep import is_dicom
from sfumato.data.images import load_array
from sfumato.data.series import series_header
from sfumato.data.sources.splits import split_of
from sfumato.data.tables import rows_by_file
from sfumato.errors import DataError, explained
from sfumato.settings.data import OUTER, Groups
from sfumato.storage.documents import read_yaml

# Words that are not real ids, in the form that `plain_id` returns
ID_WORDS: dict[str, str] = dict(read_yaml(Path(__file__).with_suffix(".yaml")))
NO_ID = {"", *ID_WORDS["unknown"].split()}
UNCLEAR = {*ID_WORDS["unclear"].split()}
# Ids of no real person, such as phantom3
STANDS_IN = re.compile(rf"({'|'.join(ID_WORDS['stands_in'].split())})\d{{0,4}}")
NO_DATE = re.compile(
    r"(19(00|01|70)-1-1|1-1-19(00|01|70)|1111-11-11|11-11-1111|9999-12-31|31-12-9999)[-t0]*"
)
# Numbers that rarely identify a person: a placeholder date without separators, consecutive
# digits, or one repeated digit
NO_NUMBER = re.compile(
    r"19(00|01|70)0101|10?119(00|01|70)|123456(7(8(90?)?)?)?|9{2,}|(?P<digit>\d)(?P=digit){5,}"
)
# Invisible characters outside Unicode's categories Cc, Cf, Cs, Co and Cn (control, format, …)
UNSEEN = re.compile("[\\s\u034f\u115f\u1160\u180b-\u180f\u2800\ufe00-\ufe0f\U000e0100-\U000e01ef]")
# Look-alikes of small letters. Each letter is mapped to a digit or a Latin letter that looks like
# it or like its capital: н to h, because Н looks like H
LOOK_ALIKE = str.maketrans(
    "авекмнорстухіјѕαβεηικμνορτυχζoilıøłđ", "abekmh0pctyx1jsabeh1kmn0ptyxz011101d"
)

Ids = list[str | None]


class GroupIndex:
    """An index of the images of each group.

    groups: (N,) int64, number of each image's group;
    order: (N,), indices of all images, sorted by group;
    starts, sizes: (G,), each group's first position in `order`, and its number of images.
    """

    def __init__(self, groups: np.ndarray) -> None:
        self.order = np.argsort(groups, kind="stable")
        self.sizes = np.unique(groups, return_counts=True)[1]
        self.starts = np.cumsum(self.sizes) - self.sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def images_of(self, chosen: np.ndarray) -> np.ndarray:
        """Return the indices of all images of the groups `chosen`, group by group."""
        sizes = self.sizes[chosen]
        offsets = np.cumsum(sizes) - sizes
        return self.order[np.repeat(self.starts[chosen] - offsets, sizes) + np.arange(sizes.sum())]


def ids_of_files(
    groups: Groups, files: Sequence[Any], root: Path, cells: Sequence[str] | None = None
) -> Ids:
    """Find the id of the person of each picture, by the rule `groups`.

    files: pictures below `root`, in the order of the ids to return;
    cells: cells of the column of ids, in the order of `files`, if the rule names a column.

    Raises DataError if a table cannot be read or does not match the files. Also raises the errors
    of `ids_of_persons` and `checked_ids`.
    """
    ids: Sequence[str | None]
    if groups.folder == OUTER:
        ids = [file.parents[1].name for file in files]
    elif groups.folder:
        train, test = split_of(root)
        parts = {*train, *test}
        ids = [None if file.parents[1] in parts else file.parent.name for file in files]
    elif groups.volume:
        # Not passed to `checked_ids`: it refuses similar ids, but volumes may have similar paths
        return [str(file.relative_to(root)) for file in files]
    elif groups.array:
        ids = ids_of_array(load_array(root / "groups.npy"), len(files), str(root / "groups.npy"))
    elif groups.csv is None:
        return ids_of_persons(groups, persons_of(groups, files, cells or ()))
    else:
        table = Path(groups.csv).expanduser()
        with explained(DataError, lambda error: f"data.groups.csv={error}", causes=(DataError,)):
            rows = rows_by_file(table, ("file", "group"), files, root)
        ids = [rows[file][0] for file in files]
    return checked_ids(ids, groups)


def persons_of(groups: Groups, files: Sequence[Any], cells: Sequence[str]) -> list[str]:
    """Return, for each picture, the text that contains the id of its person.

    With a pattern, this is the file name. With `groups.dicom`, it is the PatientID, or "" for a
    picture in another format. Otherwise it is the cell in the column of ids. cells: the cells of
    this column, in the order of `files`.
    """
    if groups.pattern is not None:
        return [file.name for file in files]
    if groups.dicom:
        picture_suffixes = registered_extensions()
        patients = []
        for file in files:
            patients.append("")
            if file.suffix.lower() not in picture_suffixes or is_dicom(file):
                patients[-1] = series_header(file).patient
        return patients
    return [*cells]


def ids_of_persons(groups: Groups, persons: Sequence[str]) -> Ids:
    """Return the ids in `persons`, the texts that `persons_of` returns.

    Raises the errors of `ids_in_names` and `checked_ids`.
    """
    if groups.pattern is None:
        return checked_ids(persons, groups)
    return checked_ids(ids_in_names(groups.pattern, persons, groups.alone), groups)


def ids_in_names(pattern: str, names: Sequence[str], alone: bool) -> Ids:
    """Find the id in each file name by a pattern.

    Raises DataError if a name has no id. With `alone`, such a name gets None, and DataError is
    raised only if no name has an id.
    """
    matches = [re.search(pattern, name) for name in names]
    missed = [name for name, match in zip(names, matches, strict=True) if match is None]
    if missed and (not alone or len(missed) == len(names)):
        raise DataError(
            "data.groups.pattern={pattern} finds no id in {missed} of {files} file names, such as "
            "{example}: change the pattern. If each image without an id is the only image of its "
            "person, set data.groups.alone: true ({option.alone})",
            option="groups",
            pattern=pattern,
            missed=len(missed),
            files=len(names),
            example=missed[0],
            undecided=True,
        )
    return [match and match[1] for match in matches]


def ids_of_array(array: np.ndarray, count: int, name: str) -> Ids:
    """Return the ids in an array of whole numbers or text, one for each of `count` images, in their
    order. Raises DataError for any other array.

    name: name of the array, for messages.
    """
    if array.dtype.kind not in "iuU" or array.ndim != 1:
        raise DataError(
            f"{name} is an array of type {array.dtype} with {array.ndim} dimension(s): expected "
            "one dimension of whole numbers or text"
        )
    if len(array) != count:
        raise DataError(
            f"{name} has more or fewer ids than there are images: expected one id per image, in "
            "the order of the images"
        )
    return [str(value) for value in array]


def checked_ids(ids: Sequence[str | None], groups: Groups) -> Ids:
    """Check the ids, and return them with None for images without an id.

    With `groups.alone`, an image without an id is a group by itself. Otherwise a missing id raises
    DataError, because the image may show anyone. DataError is also raised for an id that may mean
    several persons, for two different ids that may mean one person, and if all images have the
    same id.
    """
    forms = {text: plain_id(text or "") for text in {*ids}}
    unclear = {
        form
        for form in {*forms.values()}
        if is_unclear(form, forms.values(), groups.pattern is not None)
    }
    names_by_spelling: dict[str, str] = {}
    names: Ids = []
    for number, text in enumerate(ids, 1):
        picture = f"image {number} (in the order of classes and names)"
        name = None
        if forms[text] not in NO_ID:
            name = text
        if name is None and not groups.alone:
            raise DataError(
                f"data.groups: {picture} has no id: add one. If each image without an id is the "
                "only image of its person, set data.groups.alone: true"
            )
        if forms[text] in unclear:
            raise DataError(
                f"data.groups: {picture} has an id that often means an unknown person or several "
                "persons (examples of such ids: 0, 999, anonymized, John Doe, 1900-01-01). If the "
                "person is unknown, leave the id empty. Otherwise change the id, for example by "
                "adding a letter in front"
            )
        if name is not None and any(
            names_by_spelling.setdefault(key, name) != name
            for key in {spelling(name), in_order(name)}
        ):
            raise DataError(
                f"data.groups: {picture} has an id that differs from an earlier id only in case, "
                "spaces, punctuation, accents or umlauts, leading zeros, the order of names, or "
                "look-alike or invisible characters. If both ids mean the same person, use one "
                "spelling. Otherwise make the ids clearly different"
            )
        names.append(name)
    for number, name in enumerate(names, 1):
        # A short last part may be the number of a visit: P12/1 becomes P12
        person = name and re.sub(r"(?<=\w)[\s/._(-]+\w{1,2}\)?\s*$", "", name)
        if person and names_by_spelling.get(spelling(person), name) != name:
            raise DataError(
                f"data.groups: image {number} (in the order of classes and names) has an id that "
                "extends another id by a short part, as P12/1 extends P12. If both ids mean the "
                "same person, use one id. Otherwise make the ids clearly different"
            )
    if len({*names}) == 1 and None not in names:
        raise DataError(
            "data.groups assigns all images to one person: expected a different id for each person"
        )
    return names


def is_unclear(form: str, forms: Collection[str], in_names: bool) -> bool:
    """Return whether an id often means an unknown person or several persons.

    form: the id, converted by `plain_id`; forms: all ids of the set, converted in the same way;
    in_names: whether the ids are parts of file names.

    A number such as 999 is treated as one person's id if the next lower or the next higher number
    is an id too. In file names, 0 is treated as one person's id if 1 and 2 are ids too, because the
    owner may count persons from 0.
    """
    if NO_NUMBER.fullmatch(form):
        return not {str(int(form) - 1), str(int(form) + 1)} & {*forms}
    if form == "0" and in_names:
        return not {"1", "2"} <= {*forms}
    return form in UNCLEAR or bool(STANDS_IN.fullmatch(form) or NO_DATE.fullmatch(form))


def in_order(text: str) -> str:
    """Return the `spelling` of a name with its words sorted, so that Smith John equals John
    Smith.
    """
    words = re.split(r"[\s,;^_.-]+", text.strip())
    if all(re.fullmatch(r"[^\W\d_]+", unicodedata.normalize("NFC", word)) for word in words):
        words.sort(key=str.casefold)
    return spelling(" ".join(words))


def plain_id(text: str) -> str:
    """Convert an id to lower case, and keep only its letters and digits.

    Separators between digits become "-", and so does a minus sign at the start of an id such as -9.
    Accents, leading zeros and a final ".0" are dropped.
    """
    letters = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", text).casefold())
    characters = (
        c
        for c in letters
        if unicodedata.category(c)[0] != "C"
        and not UNSEEN.match(c)
        and not unicodedata.combining(c)
    )
    digits = "".join(
        str(unicodedata.decimal(c, "-" if unicodedata.category(c) == "Pd" else c))
        for c in characters
    )
    integers = re.sub(r"(?<=\d)\.0+$", "", digits.replace("−", "-"))
    marked = re.sub(r"(?<=\d)[\W_]+(?=\d)|^-(?=\d)", "§", integers)
    return re.sub(r"(?<!\d)0+(?=\d)", "", re.sub(r"[^\w§]|_", "", marked).replace("§", "-"))


@functools.cache
def spelling(text: str) -> str:
    """Map all spellings of an id to one text.

    The result of `plain_id` is changed in two ways. In words of four or more letters, ae, oe, ue
    and aa become a, o, u and a, so that Müller equals Mueller. Characters that look alike are
    replaced by one of them.
    """
    name = re.sub(
        r"[^\W\d_]{4,}", lambda word: re.sub("([aou])e|a(?=a)", r"\1", word[0]), plain_id(text)
    )
    return re.sub(r"(?<!\d)0+(?=\d)", "", name.translate(LOOK_ALIKE))


def refuse_crowd(sizes: np.ndarray, groups: Groups) -> None:
    """Raise DataError if one id has far more images than the others.

    The limit is `groups.largest` (by default 30), or 10 times the 90th percentile of `sizes` if
    that is more. sizes: (G,), number of images per id.
    """
    percentile = np.quantile(sizes, 0.9)
    largest = sizes.max()
    if largest > max(10 * percentile, groups.largest or 30):
        raise DataError(
            f"data.groups assigns {largest} images to one id, although 90 % of the ids have at "
            f"most {percentile:g} images. If this id means that the person is unknown, remove it "
            "(in a table, leave its cells empty). If it means one person, set data.groups.largest: "
            f"{largest}"
        )
