"""Content digests: of canonical JSON, and of files."""

import hashlib
import json
import os
from pathlib import Path

from sfumato.errors import DataError

LARGEST_FILE = 2**36  # bytes: far above all weights and images that a stage writes or reads


def canonical(data: object) -> bytes:
    """The one JSON form of `data`: sorted keys, no spaces. Raises ValueError for a NaN or an infinity."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest_of(data: object) -> str:
    return hashlib.sha256(canonical(data)).hexdigest()


def digest_of_file(path: Path) -> str:
    """The sha256 of a file. Raises DataError if it is larger than LARGEST_FILE, such as a hole of a terabyte."""
    with path.open("rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > LARGEST_FILE:
            largest = f"more than the {LARGEST_FILE // 2**30} allowed: it is damaged, or not what it should be"
            raise DataError(f"{path} has {size / 2**30:.0f} GiB, {largest}")
        return hashlib.file_digest(file, "sha256").hexdigest()
