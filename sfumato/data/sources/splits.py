"""Training images and the hold-out by the names of folders: train, val and test, in any case."""

import re
from pathlib import Path

from sfumato.data.tables import table_in

TRAIN = "train"
TEST = "test"
VALIDATION = ("val", "valid", "validation", "dev")  # they join the training part: nothing is chosen by them
PARTS = {TRAIN: TRAIN, "training": TRAIN, TEST: TEST, "testing": TEST, **dict.fromkeys(VALIDATION, TRAIN)}
LEFT_BY_SYSTEMS = {"thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx", "dicomdir"}  # in any case; and hidden files


def visible(folder: Path) -> list[Path]:
    """The entries of a folder, by name, without hidden files and those of operating systems."""
    entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    return [e for e in entries if not e.name.startswith(".") and e.name.lower() not in LEFT_BY_SYSTEMS]


def is_test(name: str) -> bool:
    """Whether a file is of the hold-out: its name begins with "test", or has it, or a word for it, as a word."""
    words = re.findall("[a-z]+", name.casefold())
    return name.startswith(TEST) or TEST in map(PARTS.get, words)


def folders_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [entry for entry in visible(folder) if entry.is_dir()]


def split_of(path: Path) -> tuple[list[Path], list[Path]]:
    """The folders of the training part, and those of the hold-out: by their names, if there are no others.

    Others are let be where a part for training has a table. Otherwise it is the folder itself, without a hold-out.
    """
    parts = [(folder, PARTS.get(folder.name.casefold())) for folder in folders_in(path)]
    train = [folder for folder, part in parts if part == TRAIN]
    if train and (all(part for _, part in parts) or any(map(table_in, train))):
        return train, [folder for folder, part in parts if part == TEST]
    return [path], []
