"""Record the broken pictures that were left out of a prepared set, and check whether they can be
read now.
"""

import json
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from sfumato.data.decoding import Member, PictureFile, decoded
from sfumato.data.sources.packed import in_archives
from sfumato.data.sources.source import Request, Source
from sfumato.data.volumes import Slice
from sfumato.errors import DataError
from sfumato.settings.data import Data
from sfumato.storage.documents import read_json

# Private files beside the set
LEFT_OUT = "left_out.txt"  # pictures that were left out, with reasons
LEFT_OUT_FILES = "left_out.json"  # paths of these pictures, so that they can be tried again


def texts_left_out(source: Source) -> dict[str, str]:
    """Return the contents of LEFT_OUT (one reason per line) and of LEFT_OUT_FILES (JSON).

    Returns {} if no picture was left out. The source must have been read to its end.
    """
    entries = source.left_out.values()
    if not entries:
        return {}
    return {
        LEFT_OUT: in_archives("\n".join(entry.reason for entry in entries)),
        LEFT_OUT_FILES: json.dumps([place_of(entry.file) for entry in entries]),
    }


def place_of(file: PictureFile) -> list[str | int | None]:
    """Encode a picture for JSON: the path of its file and, if the file contains several pictures,
    its position.
    """
    if isinstance(file, Path):
        return [to_url(file)]
    if isinstance(file, Slice):
        return [to_url(file.path), file.number, file.axis]
    return [to_url(file.shard), file.start, file.size, to_url(file.name)]


def to_url(path: Path | str) -> str:
    """Escape a path as in a URL, so that JSON can store a name that is not valid UTF-8."""
    return quote(str(path), errors="surrogateescape")


def from_url(text: str) -> str:
    return unquote(text, errors="surrogateescape")


def file_at(path: str, *position: Any) -> PictureFile:
    """Return the picture that `place_of` encoded."""
    file_path = Path(from_url(path))
    if not position:
        return file_path
    if len(position) == 2:
        return Slice(file_path, *position)
    start, size, name = position
    return Member(file_path, start, size, from_url(name))


def still_broken(home: Path, data: Data) -> bool:
    """Return whether all pictures that were left out of the set in `home` are still unreadable.

    Returns True if no picture was left out. Returns False if pictures were left out, but the list
    LEFT_OUT_FILES is missing. Raises FileNotFoundError if a listed picture no longer exists, for
    example in a temporary folder.
    """
    if not (home / LEFT_OUT).exists():
        return True
    # An older version of the program wrote no list. It may have left out pictures because of a
    # failing disk, so all pictures must be read again
    if not (home / LEFT_OUT_FILES).exists():
        return False
    files = [file_at(*place) for place in read_json(home / LEFT_OUT_FILES)]
    request = Request(section="data", name=data.source, path=data.path, range=data.range or (0, 1))
    with closing(decoded(files, request)) as pictures:
        return all(isinstance(picture, DataError) for picture in pictures)
