"""Limits on what a file may expand to while it is read: a picture, an archive, a table, a document.

Headers are compared with these limits before memory is taken or a file is written. Needs the standard library only.
"""

import io
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sfumato.errors import DataError

LARGEST_PICTURE = 2**28  # bytes of pixels, or of its file: 89 megapixels in colour, 134 in grey at 16 bits
LONGEST_SIDE = 2**16 - 1  # pixels, as in a data card
LARGE_PICTURE = 2**25  # bytes: pictures above are decoded one after the other, whatever the number of threads
EXPANSION = 100  # times its own size that an archive may expand to; masks of one colour reach 100, pictures 2
DEEPEST_ARCHIVE = 3  # archives within each other
DEEPEST_FOLDER = 50  # folders within each other in an archive
DISK_BLOCK = 4096  # bytes of disk that an empty file takes, about
SPARE_DISK = 2**28  # bytes that stay free
LARGEST_DIRECTORY = 2**27  # bytes that list the files of an archive: 1.3 million pictures of ImageNet take 10⁸
MOST_CELLS = 10_000_000  # of a table; CelebA's has 8.3 million
MOST_ROWS = 2_000_000  # of a table
LONGEST_ROW = 2**20  # characters of a row of a table
LARGEST_TEXT = 2**28  # bytes of a document or a table
MOST_VALUES = 2_000_000  # in a JSON document

large_picture = threading.RLock()


def check_picture(name: str, height: int, width: int, channels: int = 1, itemsize: int = 1) -> int:
    """The bytes that a picture takes, by its header. Raises DataError if they are more than LARGEST_PICTURE.

    itemsize: bytes of a value.
    """
    size = height * width * channels * itemsize
    if size > LARGEST_PICTURE or max(height, width) > LONGEST_SIDE:
        raise DataError(
            f"{name} has {height}×{width} pixels, {size:,} bytes when decoded: expected sides of at most "
            f"{LONGEST_SIDE:,} pixels and {LARGEST_PICTURE:,} bytes. Save it smaller, or remove it."
        )
    return size


@contextmanager
def room_for_picture(name: str, height: int, width: int, channels: int = 1, itemsize: int = 1) -> Iterator[None]:
    """Check a picture's header as `check_picture` does, and wait while another large picture is being decoded."""
    if check_picture(name, height, width, channels, itemsize) <= LARGE_PICTURE:
        yield
        return
    with large_picture:
        yield


def check_picture_file(name: str, size: int) -> None:
    """Raise DataError if the file of a picture has more bytes than a picture may have pixels."""
    if size > LARGEST_PICTURE:
        raise DataError(
            f"{name} has {size:,} bytes, expected at most {LARGEST_PICTURE:,} of one picture: save it smaller, "
            "or remove it."
        )


class Allowance:
    """The bytes that an archive, and the archives within it, may still write into a folder."""

    def __init__(self, path: Path, size: int, folder: Path) -> None:
        """path: of the archive; size: its bytes."""
        self.path = path
        self.folder = folder
        made = next(place for place in (folder, *folder.parents) if place.exists())
        free = shutil.disk_usage(made).free - SPARE_DISK
        self.limit = max(0, min(free, max(LARGEST_PICTURE, EXPANSION * size)))
        self.left = self.limit

    def take(self, size: int) -> None:
        """Reserve a file of so many bytes. Raises DataError if that is more than what is left."""
        self.require(max(size, DISK_BLOCK))
        self.left -= max(size, DISK_BLOCK)

    def require(self, size: int) -> None:
        """Raise DataError if so many bytes are more than what is left."""
        if size > self.left:
            raise DataError(
                f"{self.path} expands to more than {self.limit:,} bytes. It may take {EXPANSION} times its own size "
                f"({LARGEST_PICTURE:,} bytes if that is more), and what is free in {self.folder}. "
                "If it holds what it should, unpack it by hand and give the folder."
            )


class BoundedReader(io.BufferedReader):
    """A file whose headers may claim any size: a read takes no more memory than the file has bytes left."""

    def __init__(self, path: Path, most: int) -> None:
        """most: bytes that one read may ask for, of those that there are."""
        super().__init__(path.open("rb", buffering=0))
        self.most = most
        self.size = os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        """As usual. Raises ValueError for more than `most` bytes."""
        left = max(0, self.size - self.tell())
        if size is None or size < 0 or size > left:
            size = left
        if size > self.most:
            raise ValueError(f"a part of it has {size:,} bytes, expected at most {self.most:,}")
        return super().read(size)


def check_values(text: str) -> None:
    """Raise ValueError if a JSON text has more than MOST_VALUES values, by its commas and brackets."""
    values = sum(map(text.count, ",[{"))
    if values > MOST_VALUES:
        raise ValueError(f"it has {values:,} values, expected at most {MOST_VALUES:,}")
