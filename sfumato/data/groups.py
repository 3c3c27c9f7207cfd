"""Groups: which images are of one person. Ids are private: messages name no id and no file, but count images."""

import re
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data.images import load_array
from sfumato.data.tables import rows_by_file
from sfumato.errors import DataError, PrivateError
from sfumato.settings.data import OUTER, Groups

# what tables hold where nothing is known, as `spelling` has it
UNKNOWN = "_ na n/a #n/a <na> nan nat none null nil unknown unk missing anonymous notavailable ? ?? - --"
NO_ID = {"", *UNKNOWN.split()}
UNCLEAR = {"0", "-1"}  # ids in some tables, and in others what stands for none
# what is not seen, besides the categories C
UNSEEN = re.compile("[\\s\u034f\u115f\u1160\u180b-\u180f\u2800\ufe00-\ufe0f\U000e0100-\U000e01ef]")
# Cyrillic and Greek letters, small, that look like Latin ones in small or capital letters; and apostrophes, minus
LOOK_ALIKE = str.maketrans("авекмнорстухіјѕαβεηικμνορτυχζ’‘ʼ−", "abekmhopctyxijsabehikmnoptyxz'''-")
COLUMNS = ("file", "group")

Ids = list[str | None]


class PatternMisses(PrivateError):
    """A pattern that finds no id in the names of some files. How many, and one of them, a terminal shows alone."""

    option, proposed = "groups", None  # of `survey`, that decides

    def __init__(self, pattern: str, missed: list[str], total: int) -> None:
        local = f" It misses {len(missed)} of {total}, such as {missed[0]}." if sys.stderr.isatty() else ""
        fix = "or say data.groups.alone: true (--alone) where each such image is the only one of its person"
        super().__init__(f"data.groups.pattern={pattern} finds no id in some file names: change it, {fix}.{local}")


class GroupIndex:
    """The images of each group. groups: (N,) int64, the number of each image's group.

    order: (N,) indices of images, group after group; starts, sizes: (G,), where a group begins there, and its length.
    """

    def __init__(self, groups: np.ndarray) -> None:
        self.order = np.argsort(groups, kind="stable")
        self.sizes = np.unique(groups, return_counts=True)[1]
        self.starts = np.cumsum(self.sizes) - self.sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def images_of(self, chosen: np.ndarray) -> np.ndarray:
        """Indices of all images of the groups `chosen`, group after group."""
        sizes = self.sizes[chosen]
        before = np.cumsum(sizes) - sizes
        return self.order[np.repeat(self.starts[chosen] - before, sizes) + np.arange(sizes.sum())]


def ids_of_files(groups: Groups, files: Sequence[Any], root: Path, given: Sequence[str] | None = None) -> Ids:
    """The id of each picture, by its name, its folder, a table or groups.npy. files: below `root`, in their order.

    given: those of the column, from a table. Raises ConfigError if they are not; DataError where a
    table is none; PrivateError where it does not fit the files, or as `checked`.
    """
    if groups.pattern is not None:
        matches = [re.search(groups.pattern, file.name) for file in files]
        missed = [file.name for file, match in zip(files, matches, strict=True) if match is None]
        if missed and (not groups.alone or len(missed) == len(files)):
            raise PatternMisses(groups.pattern, missed, len(files))
        return checked([match and match[1] for match in matches], groups)
    if groups.folder == OUTER:
        return checked([file.parents[1].name for file in files], groups)
    if groups.folder:
        return checked([file.parent.name if file.parent.parent != root else None for file in files], groups)
    if groups.dicom:
        from sfumato.data.sources.deep import patient_of

        return checked([patient_of(file, f"picture {i}") for i, file in enumerate(files, 1)], groups)
    if groups.array:
        return checked(ids_of_array(load_array(root / "groups.npy"), len(files), str(root / "groups.npy")), groups)
    if groups.column is not None:
        return checked(given or (), groups)
    rows = rows_by_file(Path(str(groups.csv)).expanduser(), f"data.groups.csv={groups.csv}", COLUMNS, files, root)
    return checked([rows[file][0] for file in files], groups)


def ids_of_array(array: np.ndarray, count: int, what: str) -> Ids:
    """The ids in an array: whole numbers or text, one for each of `count` images, in their order."""
    if array.dtype.kind not in "iuU" or array.ndim != 1:
        raise DataError(f"{what} is {array.dtype} in {array.ndim} dimensions, expected a row of whole numbers or text")
    if len(array) != count:
        raise PrivateError(f"{what} has another length than the images: give one id for each, in their order")
    return [str(value) for value in array]


def checked(ids: Sequence[str | None], groups: Groups) -> Ids:
    """The ids, None for an image without one. Raises PrivateError where one is missing, or two may be one person's.

    `groups.alone`: an image without an id is a group by itself. Otherwise it is refused: it may be of anyone.
    """
    known: dict[str, str] = {}
    found: Ids = []
    for number, text in enumerate(ids, 1):
        where = f"data.groups gives image {number}, in the order of classes and names,"
        name = None if text is None or spelling(text) in NO_ID else text
        if name is None and not groups.alone:
            fix = "give it one, or say data.groups.alone: true where each such image is the only one of its person"
            raise PrivateError(f"{where} no id: {fix}")
        if name is not None and spelling(name) in UNCLEAR:
            raise PrivateError(
                f"{where} an id that often stands for an unknown person (0 or -1): leave it empty if the person is "
                "unknown; otherwise write another, such as one with a letter in front"
            )
        if name is not None and known.setdefault(spelling(name), name) != name:
            raise PrivateError(
                f"{where} an id that differs from another in capitals, spaces, leading zeros, or characters that look "
                "alike or are not seen alone: is it one person? Spell them alike, or make them differ in more"
            )
        found.append(name)
    if len(known) == 1 and None not in found:
        raise PrivateError("data.groups puts all images into one group: it must tell one person from another")
    return found


def spelling(text: str) -> str:
    """What two spellings of one id have in common: neither capitals nor what is not seen, and one sign for a look."""
    kinds = [(unicodedata.category(c), c) for c in unicodedata.normalize("NFKC", text).casefold()]
    shown = ["-" if kind == "Pd" else c for kind, c in kinds if kind[0] != "C" and not UNSEEN.match(c)]
    folded = "".join(shown).translate(LOOK_ALIKE)
    return re.sub(r"(?<!\d)0+(?=\d)", "", re.sub(r"(?<=\d)\.0+$", "", folded))
