"""Content digests of canonical JSON, of files, and of folders as DVC computes them."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from sfumato.errors import DataError


def canonical(data: object) -> bytes:
    """Return the unique JSON form of `data`: sorted keys, no spaces.

    Raises ValueError for a NaN or an infinity.
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest_of(data: object) -> str:
    return hashlib.sha256(canonical(data)).hexdigest()


def digest_of_file(path: Path) -> str:
    """Return the sha256 of a file.

    Raises DataError if the file has more than 64 GiB. A stage writes and reads far smaller files.
    """
    with path.open("rb") as file:
        gigabytes = os.fstat(file.fileno()).st_size / 2**30
        if gigabytes > 64:
            largest = (
                "expected at most 64 GiB: replace it with the correct file, or correct its path"
            )
            raise DataError(f"{path} has {gigabytes:.0f} GiB, {largest}")
        return hashlib.file_digest(file, "sha256").hexdigest()


def md5_of(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def md5_of_file(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def md5_of_listing(files: Mapping[str, str]) -> str:
    """Return DVC 3's hash of a folder, from the md5 of each file by its path.

    The hash is an md5 over the paths and hashes of all files, then ".dir".
    """
    entries = [{"md5": md5, "relpath": name} for name, md5 in sorted(files.items())]
    return md5_of(json.dumps(entries, sort_keys=True).encode()) + ".dir"


def tracked_files(folder: Path) -> list[Path]:
    """List the files in a folder, except those that `.dvcignore` excludes."""
    return [
        file
        for file in folder.rglob("*")
        if file.is_file() and not file.name.endswith(".pyc") and "__pycache__" not in file.parts
    ]


def md5_of_folder(folder: Path) -> str:
    """Return the hash that DVC gives a folder."""
    return md5_of_listing(
        {file.relative_to(folder).as_posix(): md5_of_file(file) for file in tracked_files(folder)}
    )
