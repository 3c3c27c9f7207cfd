"""Recognise training images and the hold-out by names of folders such as train, val, test or
train_images.
"""

import os
import re
from pathlib import Path

from sfumato.data.tables import table_in

TRAIN = "train"
TEST = "test"
# Names of validation parts. These parts are added to the training part, because this program needs
# no validation part
VALIDATION = ("val", "valid", "validation", "dev")
PARTS = {
    TRAIN: TRAIN,
    "training": TRAIN,
    TEST: TEST,
    "testing": TEST,
    **dict.fromkeys(VALIDATION, TRAIN),
}


# Files and folders that operating systems and storage devices create beside pictures, in lower case
OF_SYSTEMS = {
    "thumbs.db",
    "ehthumbs.db",
    "desktop.ini",
    "dicomdir",
    "__macosx",
    "__pycache__",
    "lost+found",
    "found.000",
}
OF_SYSTEMS |= {"$recycle.bin", "recycler", "#recycle", "@recycle", "system volume information"}
OF_SYSTEMS |= {"@eadir", "@tmp", "#snapshot", "@recently-snapshot", "$windows.~bt"}


def visible(folder: Path) -> list[Path]:
    """Return the entries of a folder, sorted by name.

    Hidden entries, and entries with a name in OF_SYSTEMS, are left out.
    """
    return [folder / name for name in visible_names(folder)]


def visible_names(folder: Path) -> list[str]:
    """Return the names of the entries that `visible` returns; names take much less memory."""
    return sorted(
        name
        for name in os.listdir(folder)
        if not name.startswith(".") and name.lower() not in OF_SYSTEMS
    )


def is_test(name: str) -> bool:
    """Return whether a file belongs to the hold-out: its name begins with "test", or contains the
    word "test" or "testing".
    """
    return name.startswith(TEST) or TEST in map(PARTS.get, words_in(name))


def words_in(name: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", name.casefold())


def is_filing(name: str) -> bool:
    """Return whether a name only describes how files are stored, such as images_001, Train, masks
    or HAM10000_images_part_1.
    """
    pattern = (
        "(image|img|picture|photo|scan|file|mask|label|annotation|segmentation|part|fold)s?|"
        "(data)?set|raw|data"
    )
    other_words = [
        word for word in words_in(name) if word not in PARTS and not re.fullmatch(pattern, word)
    ]
    numbered_words = re.findall(r"[^\W\d_]+(?=\d)", name.casefold())
    return {*other_words} <= {*numbered_words} and len(other_words) < len(words_in(name))


def part_named(folder: Path) -> str | None:
    """Return TRAIN or TEST by a folder's name, such as train, Testing or val_images; None for other
    names.
    """
    parts = {PARTS[word] for word in words_in(folder.name) if word in PARTS}
    if len(parts) != 1 or not is_filing(folder.name):
        return None
    return parts.pop()


def folders_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [entry for entry in visible(folder) if entry.is_dir()]


def split_of(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the training folders and the hold-out folders in `path`, recognised by name.

    Names count only if there is a training folder. In addition, all folders must be parts (see
    `part_named`), or a training folder must contain a table. Otherwise, returns only `path` itself,
    and no hold-out.
    """
    parts = [(folder, part_named(folder)) for folder in folders_in(path)]
    train = [folder for folder, part in parts if part == TRAIN]
    if train and (all(part for _, part in parts) or any(map(table_in, train))):
        return train, [folder for folder, part in parts if part == TEST]
    return [path], []
