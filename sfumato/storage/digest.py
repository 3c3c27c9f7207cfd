"""Content digests of canonical JSON and of files."""

import hashlib
import json
import os
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
