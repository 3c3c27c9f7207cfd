"""Read JSON files of unknown origin, as `documents` describes, with only the standard library."""

import json
import math
import os
import re
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

from sfumato.storage.files import reading
from sfumato.storage.limits import LARGEST_TEXT, check_values

DEEPEST = 50  # Levels of nested lists and mappings


class MergeConflict(ValueError):
    """A text contains git's marks of a merge conflict."""


def read_text(path: Path, largest: int = LARGEST_TEXT) -> str:
    """Read a regular file of at most `largest` bytes of UTF-8.

    Pipes and devices are refused at once. Raises MergeConflict if the text contains git's marks of
    a merge conflict.
    """
    text = read_bytes(path, largest).decode("utf-8")
    if "\n>>>>>>> " in text and re.search("^<<<<<<< ", text, re.MULTILINE):
        raise MergeConflict(
            "it contains both sides of a merge conflict, between <<<<<<< and >>>>>>>"
        )
    return text


def read_bytes(path: Path, largest: int) -> bytes:
    """Read a regular file of at most `largest` bytes. Pipes and devices are refused at once."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(largest + 1) if size <= largest else b""
    if max(size, len(content)) > largest:
        raise ValueError(f"it has more than {largest:,} bytes")
    return content


def read_json(path: Path, *, infinite: bool = False) -> Any:
    """Read a JSON file. infinite: accept NaN and infinities, as in files of other programs."""
    return parse_json(read_text(path), infinite=infinite)


def parse_json(text: str, *, infinite: bool = False) -> Any:
    """Parse JSON. An integer of more than 64 bits becomes a float, as in most readers of JSON."""

    def number(text: str) -> float:
        if not math.isfinite(value := float(text)) and not infinite:
            raise ValueError(f"it contains {text[:24]}: NaN and infinity are not allowed")
        return value

    def integer(text: str) -> int | float:
        if len(text) <= 20 and abs(int(text)) < 2**63:
            return int(text)
        return number(text)

    check_values(text)
    try:
        content = json.loads(
            text,
            parse_int=integer,
            parse_float=number,
            parse_constant=number,
            object_pairs_hook=once,
        )
    except RecursionError as error:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from error
    check_plain(content)
    return content


def once(pairs: Iterable[tuple[Hashable, object]]) -> dict[Hashable, object]:
    content: dict[Hashable, object] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key!r} appears twice: remove one")
        content[key] = value
    return content


def check_plain(content: object, level: int = 0) -> None:
    """Raise ValueError for unpaired surrogates, nesting beyond DEEPEST, and integers |n| ≥ 2⁶³."""
    if isinstance(content, str):
        content.encode()
    elif isinstance(content, int):
        if abs(content) >= 2**63:
            raise ValueError(f"the number {str(content)[:24]}… is too large")
    elif isinstance(content, (dict, list)):
        if level == DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
        for inner in (*content, *content.values()) if isinstance(content, dict) else content:
            check_plain(inner, level + 1)
