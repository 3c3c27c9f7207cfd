"""Replace volumes by their slices, and order the slices and frames of DICOM series."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL.Image import registered_extensions

from sfumato.data.decoding import PictureFile
from sfumato.data.deep import is_dicom, once_per_file, read_dicom, readable
from sfumato.data.volumes import Slice, is_volume, slices_of
from sfumato.errors import DataError
from sfumato.settings.data import Volume
from sfumato.storage.limits import LONGEST_SIDE

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

LOCALIZERS = "localizers left out"
SMALLEST_FRAME = 8  # minimum number of bytes that a frame takes in a file
TAGS = (
    "ImageType",
    "PatientID",
    "SeriesInstanceUID",
    "ImagePositionPatient",
    "ImageOrientationPatient",
    "InstanceNumber",
    "NumberOfFrames",
    "BurnedInAnnotation",
)


@dataclass(frozen=True)
class Header:
    """The place of a DICOM file in its series.

    patient: the PatientID, private;
    uid: the SeriesInstanceUID, "" if the file does not state it;
    position: position along the axis of the series, None if the file does not state it;
    number: InstanceNumber, 0 if the file does not state it;
    localizer: whether the image is only an overview for planning the scan;
    burned_in: whether the file states that text is burned into its pixels.
    """

    path: Path
    patient: str
    uid: str
    position: float | None
    number: int
    frames: int
    localizer: bool
    burned_in: bool

    @property
    def series(self) -> tuple[str, str, str] | None:
        """Return the folder, the PatientID and the SeriesInstanceUID, which identify the series.

        Returns None if the file does not state a SeriesInstanceUID.
        """
        if not self.uid:
            return None
        return str(self.path.parent), self.patient, self.uid


@once_per_file
def series_header(path: Path) -> Header:
    """Read the place of a DICOM file in its series. Raises DataError if it cannot be read."""
    data = read_dicom(path, stop_before_pixels=True, specific_tags=[*TAGS])
    with readable(f"{path} cannot be read as DICOM"):
        kinds = data.get("ImageType") or []
        if isinstance(kinds, str):
            kinds = [kinds]
        number = 0
        with suppress(ValueError, TypeError):
            number = int(data.get("InstanceNumber") or 0)
        return Header(
            path=path,
            patient=str(data.get("PatientID") or ""),
            uid=str(data.get("SeriesInstanceUID") or ""),
            position=position_of(data),
            number=number,
            frames=max(1, int(data.get("NumberOfFrames") or 1)),
            localizer="LOCALIZER" in [str(kind).strip().upper() for kind in kinds],
            burned_in=str(data.get("BurnedInAnnotation", "")).strip().upper() == "YES",
        )


def position_of(data: Dataset) -> float | None:
    """Return the position of a slice along the normal of its plane, in mm; None if the file does
    not state it.
    """
    with suppress(ValueError, TypeError):
        corner = np.array(data.get("ImagePositionPatient"), float)
        directions = np.array(data.get("ImageOrientationPatient"), float).reshape(2, 3)
        position = float(np.cross(*directions) @ corner)
        if np.isfinite(position):
            return position
    return None


def holds_series(files: Sequence[Path]) -> bool:
    """Return whether some files are parts of a DICOM series.

    Returns true if two files belong to the same series, if a file has several frames, or if a file
    is a localizer.
    """
    headers = [header for file in files if (header := dicom_header(file)) is not None]
    largest = max(Counter(header.series for header in headers if header.series).values(), default=0)
    return largest > 1 or any(header.frames > 1 or header.localizer for header in headers)


def burned_in(files: Iterable[PictureFile]) -> int:
    """Count the DICOM files whose header states that text is burned into their pixels."""
    headers = map(dicom_header, files)
    return sum(header.burned_in for header in headers if header is not None)


def check_series(files: Sequence[PictureFile], ids: Sequence[str | None]) -> None:
    """Raise DataError if files of one DICOM series have different ids, or if only some have an id.

    Nothing is checked if all files have the same SeriesInstanceUID, because some programs that
    remove names write one UID into all files. ids: id of each file's person.
    """
    uids = [getattr(named_header(file), "uid", "") for file in files]
    if len({*uids} - {""}) < 2:
        return
    first_files: dict[str, tuple[PictureFile, str | None]] = {}
    for uid, file, person in zip(uids, files, ids, strict=True):
        first_file, first_person = first_files.setdefault(uid, (file, person))
        if uid and first_person != person:
            raise DataError(
                f"{first_file} and {file} belong to one DICOM series, so they show one person, but "
                "data.groups finds different ids, or an id for only one of the files: give all "
                "files of a series the same id, or correct the SeriesInstanceUID"
            )


def with_own_ids(
    files: Sequence[PictureFile], ids: Sequence[str | None], root: Path, sliced: bool
) -> list[str | None]:
    """Give each series and, if `sliced`, each volume an id of its own, unless it has an id.

    All slices of a series or volume then belong to one person. The id is the SeriesInstanceUID or,
    if the file has none or all files have the same one (see `check_series`), the file's path below
    `root`. Other pictures without an id keep None.
    """
    headers = [named_header(file) for file in files]
    uids = [getattr(header, "uid", "") for header in headers]
    counts = Counter(uids)
    new_ids = [*ids]
    for number, (file, header, uid) in enumerate(zip(files, headers, uids, strict=True)):
        if new_ids[number] is not None or not isinstance(file, Path):
            continue
        if uid and len(counts) > 1 and (sliced or counts[uid] > 1):
            new_ids[number] = uid
        elif sliced and (header is not None or is_volume(file)):
            new_ids[number] = str(file.relative_to(root))
    return new_ids


def in_slices(
    files: Sequence[PictureFile], volume: Volume, converted: Counter[str]
) -> Iterator[tuple[int, PictureFile]]:
    """Yield (index of the file in `files`, picture) for each picture in the files.

    Pictures of one series follow each other, in the order of the series. A file that cannot be read
    is yielded as one picture, because decoding it later raises an error that states the reason.

    volume: slices to use; converted: counter that receives the number of localizers, which are
    left out.

    Raises DataError if `volume` selects no slice of a series or of a NIfTI volume, or if
    `volume.axis` is set and a file is DICOM.
    """
    series: dict[tuple[str, str, str] | int, list[tuple[int, Header]]] = {}
    for number, file in enumerate(files):
        header = dicom_header(file)
        if header is not None and header.localizer:
            converted[LOCALIZERS] += 1
        elif header is not None:
            series.setdefault(header.series or number, []).append((number, header))
        else:
            series[number] = []
    for key, members in series.items():
        if members:
            yield from series_pictures(members, volume)
            continue
        assert isinstance(key, int)  # a key of another type belongs to a series, with members
        file = files[key]
        if isinstance(file, Path) and is_volume(file):
            yield from ((key, picture) for picture in slices_of(file, volume))
        else:
            yield key, file


def dicom_header(file: PictureFile) -> Header | None:
    """Return the header of a DICOM file; None for other files, and for a file that cannot be
    read.
    """
    with suppress(DataError):
        if isinstance(file, Path) and not is_volume(file) and is_dicom(file):
            return series_header(file)
    return None


def named_header(file: PictureFile) -> Header | None:
    """Do the same as `dicom_header`, but do not open a file with the suffix of another format.

    This function is called for each file of a set, often long before the pictures are read. On a
    slow disk, opening every file would take a long time.
    """
    if isinstance(file, Path) and file.suffix.lower() in registered_extensions():
        return None
    return dicom_header(file)


def series_pictures(
    members: Sequence[tuple[int, Header]], volume: Volume
) -> Iterator[tuple[int, Path | Slice]]:
    """Yield (index of the file, picture) for the pictures of one series.

    Pictures are sorted by position or, if any position is missing, by InstanceNumber. members:
    index and header of each file in the series.

    Raises DataError if `volume` selects no picture, or if `volume.axis` is set.
    """
    first = members[0][1].path
    if volume.axis is not None:
        raise DataError(
            f"{first} is a DICOM file, and DICOM images are used in the plane in which they were "
            "acquired: remove data.volume.axis."
        )
    ordered = sorted(members, key=lambda member: member[1].number)
    if all(header.position is not None for _, header in members):
        ordered.sort(key=lambda member: member[1].position or 0.0)
    pictures = [(number, picture) for number, header in ordered for picture in frames_of(header)]
    chosen = pictures[volume.selection]
    if not chosen:
        raise DataError(
            f"data.volume selects none of the images in the series of {first} (number of images: "
            f"{len(pictures)}): lower data.volume.from, or move the series out of the folder."
        )
    yield from chosen


def frames_of(header: Header) -> list[Path] | list[Slice]:
    """List the frames of a DICOM file.

    Returns the path of the file itself if it has a single frame, or if the header states too many
    frames: more than LONGEST_SIDE, or more than fit into the file. If there are too many, decoding
    the file later raises an error.
    """
    path = header.path
    max_frames = min(LONGEST_SIDE, path.stat().st_size // SMALLEST_FRAME)
    if header.frames == 1 or header.frames > max_frames:
        return [path]
    return [Slice(path, number) for number in range(header.frames)]
