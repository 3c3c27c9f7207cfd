"""Broken pictures that were left out of a prepared set: where they lie, and whether they can be read now."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from sfumato.data.decoding import Member, decoded
from sfumato.data.sources.source import Request, Source
from sfumato.errors import DataError
from sfumato.settings.data import Data
from sfumato.storage.documents import read_json

# beside the set, and private
LEFT_OUT = "left_out.txt"  # pictures of the source that are not among the images, and why
LEFT_OUT_FILES = "left_out.json"  # where they lie, to try them again


def places_left_out(source: Source) -> str:
    """What was left out of a source that was read to its end, as LEFT_OUT_FILES holds it."""
    files = dict(enumerate(source.files))
    return json.dumps([place_of(files.get(key, key)) for key in source.left_out])


def place_of(file: Path | Member) -> list[str | int]:
    """A file in JSON: its path, or the tar file and where it lies in there."""
    if isinstance(file, Path):
        return [str(file)]
    return [str(file.shard), file.start, file.size, file.name]


def file_at(path: str, *within: Any) -> Path | Member:
    """The inverse of `place_of`."""
    if not within:
        return Path(path)
    return Member(Path(path), *within)


def still_broken(home: Path, data: Data) -> bool:
    """Whether every picture left out of the set in `home` is known, and none can be read now.

    Raises FileNotFoundError for one that was unpacked for a while.
    """
    if not (home / LEFT_OUT).exists():
        return True
    if not (home / LEFT_OUT_FILES).exists():  # an older version left them out, perhaps because a disk failed
        return False
    files = [file_at(*place) for place in read_json(home / LEFT_OUT_FILES)]
    request = Request(section="data", name=data.source, path=data.path, range=data.range or (0, 1))
    with closing(decoded(files, request)) as pictures:
        return all(isinstance(picture, DataError) for picture in pictures)
