"""Find photographs taken shortly after each other, because they often show one person.

The times, devices and numbers of the photographs are compared.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

from PIL import Image
from PIL.ExifTags import IFD, Base

from sfumato.data.decoding import Member, open_picture
from sfumato.data.deep import is_dicom
from sfumato.data.names import DATED
from sfumato.errors import DataError

SECONDS = 10  # maximum time between two photographs that count as taken in a row
SHARE = 0.1  # maximum share of photographs taken in a row that counts as a coincidence


class Taken(NamedTuple):
    """The time of a photograph (seconds since 1970), its device, and the last number in its
    name.
    """

    second: float | None
    device: str
    number: int | None


def taken_in_a_row(files: Sequence[Path | Member]) -> bool:
    """Return whether many photographs were taken in a row.

    Photographs count as taken in a row if their times differ by at most SECONDS, or if one device
    took them and the numbers in their names are consecutive. The result is True if there are at
    least two such photographs, and their share of all photographs is above SHARE.
    """
    photographs = [taken_at(file) for file in files]
    times = sorted(photograph.second for photograph in photographs if photograph.second is not None)
    numbers = {
        (photograph.device, photograph.number)
        for photograph in photographs
        if photograph.device and photograph.number is not None
    }
    following = sum(
        (device, number + 1) in numbers or (device, number - 1) in numbers
        for device, number in numbers
    )
    return max(following, count_near(times, SECONDS)) > max(1, SHARE * len(files))


def count_near(times: Sequence[float], max_gap: float) -> int:
    """Count the entries of `times`, sorted, that are at most `max_gap` seconds from another."""
    close = [after - before <= max_gap for before, after in pairwise(times)]
    return sum(before or after for before, after in pairwise([False, *close, False]))


def taken_at(file: Path | Member) -> Taken:
    """Read the time and the device from EXIF, and the number from the file's name.

    If EXIF contains no time, the time is also read from the file's name. Raises OSError if the file
    cannot be read.
    """
    tags: dict[int, object] = {}
    with suppress(DataError):  # the picture is too large, which decoding reports later
        if isinstance(file, Member) or not is_dicom(file):
            tags = exif_in(open_picture(file))
    dates = [
        str(tags.get(tag, ""))
        for tag in (Base.DateTimeOriginal, Base.DateTimeDigitized, Base.DateTime)
    ]
    dates += [match[0] for match in DATED.finditer(file.name)]
    numbers = re.findall(r"\d+", file.name)
    return Taken(
        second=next(filter(None, map(second_of, dates)), None),
        device=str(tags.get(Base.BodySerialNumber, "")).strip(),
        number=next(map(int, reversed(numbers)), None),
    )


def exif_in(stream: BinaryIO) -> dict[int, object]:
    """Return the EXIF tags of a picture.

    Returns no tags for a damaged picture, because decoding will report the damage.
    """
    with (
        suppress(Exception),
        Image.open(stream, formats=["JPEG", "MPO", "PNG", "TIFF", "WEBP"]) as picture,
    ):
        exif = picture.getexif()
        return {**exif, **exif.get_ifd(IFD.Exif)}
    return {}


def second_of(text: str) -> float | None:
    """Convert a date and a time, such as 2026:01:31 12:00:05, to seconds since 1970.

    Returns None for any other text.
    """
    with suppress(ValueError):
        return datetime.strptime(
            "".join(re.findall(r"\d", text))[:14].ljust(14, "x"), "%Y%m%d%H%M%S"
        ).timestamp()
    return None
