"""Limits on the sizes to which pictures, archives, tables and documents expand when they are read.

Headers are compared with these limits before memory is allocated or a file is written. This module
needs only the standard library.
"""

import io
import math
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sfumato.errors import DataError

# Maximum size in bytes of a picture's pixels, and of its file: enough for 89 megapixels in colour,
# or for 134 megapixels in grey with 16 bits
LARGEST_PICTURE = 2**28
LARGEST_VOLUME = 2**29  # maximum bytes of a volume: 1024 slices of 512×512 in 16 bits
LONGEST_SIDE = 2**16 - 1  # maximum pixels per side, as in a data card
# Size in bytes above which pictures are decoded one at a time, regardless of the number of threads
LARGE_PICTURE = 2**25
# Maximum factor by which an archive may expand. Archives of masks of one colour reach 100, and
# archives of other pictures reach 2
EXPANSION = 100
DEEPEST_ARCHIVE = 3  # maximum number of archives nested in each other
DEEPEST_FOLDER = 50  # maximum number of nested folders in an archive
DISK_BLOCK = 4096  # approximate bytes that an empty file takes on disk
SPARE_DISK = 2**28  # bytes of the disk that stay free
# Maximum bytes of an archive's list of files. The list of ImageNet's 1.3 million pictures takes 10⁸
LARGEST_DIRECTORY = 2**27
MOST_CELLS = 10_000_000  # maximum cells in a table; the table of CelebA has 8.3 million
MOST_ROWS = 2_000_000  # maximum rows in a table
LONGEST_ROW = 2**20  # maximum characters in a row of a table
LARGEST_TEXT = 2**28  # maximum bytes of a document or a table
MOST_VALUES = 2_000_000  # maximum values in a JSON document

large_picture = threading.RLock()


def check_picture(name: str, height: int, width: int, channels: int = 1, itemsize: int = 1) -> int:
    """Return the size in bytes that a picture will have when decoded.

    name: its name in messages; height, width, channels: values in its header; itemsize: number of
    bytes per value. Raises DataError if the size is above LARGEST_PICTURE, or a side is above
    LONGEST_SIDE.
    """
    size = height * width * channels * itemsize
    if size > LARGEST_PICTURE or max(height, width) > LONGEST_SIDE:
        raise DataError(
            f"{name} has {height}×{width} pixels, {size:,} bytes when decoded: expected at most "
            f"{LONGEST_SIDE:,} pixels per side, and {LARGEST_PICTURE:,} bytes. Reduce its size, "
            "or remove it."
        )
    return size


@contextmanager
def room_for_picture(
    name: str, height: int, width: int, channels: int = 1, itemsize: int = 1
) -> Iterator[None]:
    """Check a picture by its header (`check_picture`), and return a context in which to decode it.

    If the picture is large, the context waits until no other large picture is being decoded.
    """
    if check_picture(name, height, width, channels, itemsize) <= LARGE_PICTURE:
        yield
        return
    with large_picture:
        yield


def check_picture_file(name: str, size: int) -> None:
    """Raise DataError if the file of a picture has more than LARGEST_PICTURE bytes."""
    if size > LARGEST_PICTURE:
        raise DataError(
            f"{name} has {size:,} bytes, expected at most {LARGEST_PICTURE:,} per picture: reduce "
            "its size, or remove it."
        )


def check_volume(name: str, shape: tuple[int, int, int], itemsize: int) -> None:
    """Raise DataError if a volume is empty, has more than LARGEST_VOLUME bytes, or has a side above
    LONGEST_SIDE.
    """
    size = math.prod(shape) * itemsize
    if not (min(shape) > 0 and max(shape) <= LONGEST_SIDE and size <= LARGEST_VOLUME):
        raise DataError(
            f"{name} has {'×'.join(map(str, shape))} values, {size:,} bytes when read: expected "
            f"sides of 1 to {LONGEST_SIDE:,} and at most {LARGEST_VOLUME:,} bytes. Reduce "
            "its size, or remove it."
        )


class Allowance:
    """Number of bytes that may still be unpacked from an archive and the archives inside it."""

    def __init__(self, path: Path, size: int, folder: Path) -> None:
        """Compute the limit.

        path: path of the outermost archive; size: its size in bytes; folder: a folder, which may
        not exist yet, on the disk to which the archive is unpacked.
        """
        self.path = path
        self.folder = folder
        existing_folder = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(existing_folder).free - SPARE_DISK
        self.limit = max(0, min(free, max(LARGEST_PICTURE, EXPANSION * size)))
        self.remaining = self.limit

    def take(self, size: int) -> None:
        """Reserve `size` bytes for a file, but at least DISK_BLOCK.

        Raises DataError if fewer bytes remain.
        """
        self.require(max(size, DISK_BLOCK))
        self.remaining -= max(size, DISK_BLOCK)

    def require(self, size: int) -> None:
        """Raise DataError if fewer than `size` bytes remain."""
        if size > self.remaining:
            raise DataError(
                f"{self.path} expands to more than {self.limit:,} bytes. The limit is {EXPANSION} "
                f"times the archive's size or {LARGEST_PICTURE:,} bytes, whichever is larger, but "
                f"at most the free space in {self.folder}. If the content is as expected, unpack "
                "the archive by hand, and give the path of the folder."
            )


class BoundedReader(io.BufferedReader):
    """A reader for files whose headers may claim any size.

    A read never allocates more memory than the number of bytes that remain in the file.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Open the file. max_bytes: maximum number of bytes that one read may return."""
        super().__init__(path.open("rb", buffering=0))
        self.max_bytes = max_bytes
        self.size = os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        """Read like the base class. Raises ValueError if the result would exceed `max_bytes`."""
        remaining = max(0, self.size - self.tell())
        if size is None or size < 0 or size > remaining:
            size = remaining
        if size > self.max_bytes:
            raise ValueError(
                f"a part of it has {size:,} bytes, expected at most {self.max_bytes:,}"
            )
        return super().read(size)


def check_values(text: str) -> None:
    """Raise ValueError if a JSON text has more than MOST_VALUES values, estimated from commas and
    brackets.
    """
    values = sum(map(text.count, ",[{"))
    if values > MOST_VALUES:
        raise ValueError(f"it has {values:,} values, expected at most {MOST_VALUES:,}")
