"""Read NIfTI volumes.

Each slice becomes an upright picture. If no range is set, two percentiles of the volume's values
are shown as black and as white.

Guarantee: a slice depends only on its own volume. All slices of a volume belong to one person.
"""

from __future__ import annotations

import gzip
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from sfumato.data.deep import Span, eight_bits, installed, readable
from sfumato.errors import DataError
from sfumato.storage.files import reading
from sfumato.storage.limits import check_volume

if TYPE_CHECKING:
    from sfumato.settings.data import Volume

SUFFIXES = (".nii.gz", ".nii")
# Array axis along which the slices follow each other. The array's axes point to the right, to the
# front and to the top of the body. Of the other two axes, the first is the horizontal axis of a
# slice.
AXES = {"sagittal": 0, "coronal": 1, "axial": 2}
AXIAL = "axial"
# Percentiles of a volume's values, shown as black and as white if no range is set
PERCENTILES = (1, 99)
FARTHEST_OFFSET = 2**24  # maximum number of bytes before the values
LARGEST_VALUE = 8  # maximum number of bytes per value
MAGIC = (b"n+1", b"n+2")  # how the magic number starts if one file has header and values
only_reader = threading.Lock()
# The volume that was read last. It is kept, because its slices are requested one after the other
last_read: dict[object, Values | DataError] = {}


@dataclass(frozen=True)
class Slice:
    """A slice of a NIfTI volume, or a frame of a DICOM file, read in place."""

    path: Path
    number: int  # index, from 0
    axis: str | None = None  # key of AXES; None for a frame

    @property
    def parent(self) -> Path:
        return self.path.parent

    @property
    def name(self) -> str:
        return self.path.name

    def __str__(self) -> str:
        return f"slice {self.number} of {self.path}"


@dataclass(frozen=True)
class Values:
    """The values of a volume.

    stored: values as stored, (X, Y, Z). The axes point to the right, to the front and to the top of
    the body;
    slope, intercept: factor and offset that convert stored values to the file's units;
    span: values in the file's units to show as black and as white.
    """

    stored: np.ndarray
    slope: float
    intercept: float
    span: Span


def is_volume(path: Path) -> bool:
    """Return whether a file is a NIfTI volume, by its name."""
    return path.name.lower().endswith(SUFFIXES)


def slices_of(path: Path, volume: Volume) -> list[Slice]:
    """List the slices of a volume that become pictures.

    For a damaged volume, the list has one slice. The error is raised later, when this slice is
    decoded.

    Raises DataError if the setting `volume` selects no slice.
    """
    axis = volume.axis or AXIAL
    try:
        with damaged(path), opened(path) as file:
            header = volume_header(file, path)
            without_memory = np.broadcast_to(np.zeros(1, np.uint8), shape_of(header, path))
            count = canonical_axes(without_memory, header).shape[AXES[axis]]
    except DataError:
        return [Slice(path, 0, axis)]
    numbers = range(count)[volume.selection]
    if not numbers:
        raise DataError(
            f"data.volume selects none of the {axis} slices of {path} (number of slices: {count}): "
            "lower data.volume.from"
        )
    return [Slice(path, number, axis) for number in numbers]


def decode_slice(volume_slice: Slice, span: Span | None) -> np.ndarray:
    """Show a slice of a volume as (H, W, 1) uint8; non-finite values are black.

    The top of the picture is the front of the body in axial slices, and the top of the body in
    other slices. The left of the picture is the back of the body in sagittal slices, and the left
    of the body in other slices.

    span: values in the file's units to show as black and as white; None for PERCENTILES of the
    volume.
    """
    with only_reader:
        values = volume_at(volume_slice.path, span)
        part = values.stored.take(volume_slice.number, AXES[volume_slice.axis or AXIAL])
        scaled = part * values.slope + values.intercept
        return eight_bits(
            np.where(np.isfinite(scaled), scaled, values.span[0]).T[::-1],
            values.span,
            str(volume_slice),
        )


def volume_at(path: Path, span: Span | None) -> Values:
    """Return the values of a volume.

    The values stay in memory until another volume is read. Raises DataError if the volume is
    damaged.
    """
    status = path.stat()
    key = path, status.st_mtime_ns, status.st_size, span
    if key not in last_read:
        last_read.clear()  # the old volume is dropped first, so that at most one is in memory
        try:
            last_read[key] = read_volume(path, span)
        except DataError as error:
            # The traceback is dropped, because it would keep the values in memory
            last_read[key] = error.with_traceback(None)
    values = last_read[key]
    if isinstance(values, DataError):
        raise values
    return values


def read_volume(path: Path, span: Span | None) -> Values:
    with damaged(path), opened(path) as file:
        header = volume_header(file, path)
        shape = shape_of(header, path)
        kind = header.get_data_dtype()
        size = math.prod(shape) * kind.itemsize
        file.seek(header.get_data_offset())
        content = file.read(size)  # bytes after the values are not decompressed
        if len(content) < size:
            raise EOFError(
                f"it has {len(content):,} bytes of values, but its header states {size:,}"
            )
        file.read(1)  # at the end of a gzip file, this compares the checksum
        flat = np.frombuffer(content, kind)
        stored = canonical_axes(flat.reshape(shape, order="F"), header)
        slope, intercept = header.get_slope_inter()
    slope = float(slope or 1)
    intercept = float(intercept or 0)
    if span is None:
        low, high = percentiles(flat)
        low, high = sorted((low * slope + intercept, high * slope + intercept))
        if not low < high:
            raise DataError(
                f"{path} has the same value everywhere: remove it, or replace it with a volume "
                "that has contrast."
            )
        span = low, high
    return Values(stored, slope, intercept, span)


def percentiles(flat: np.ndarray) -> tuple[float, float]:
    """Return the two PERCENTILES of the finite values. If they are equal, return the lowest and the
    highest value instead.
    """
    finite = flat
    if flat.dtype.kind == "f":
        finite = flat[np.isfinite(flat)]
    if not finite.size:
        return 0.0, 0.0
    low, high = map(float, np.percentile(finite, PERCENTILES))
    if low == high:
        return float(finite.min()), float(finite.max())
    return low, high


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Return a context that raises ConfigError if nibabel is missing, and DataError in place of any
    exception that damaged bytes cause.
    """
    with installed("volumes", str(path)):
        import nibabel

    with (
        readable(f"{path} cannot be read as NIfTI"),
        nibabel.imageglobals.LoggingOutputSuppressor(),
    ):
        yield


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a volume. If it is gzipped, its content is decompressed while it is read."""
    with reading(path) as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if packed:
            with gzip.open(file) as inflated:
                yield inflated  # type: ignore[misc]
        else:
            yield file


def volume_header(file: BinaryIO, path: Path) -> Any:
    """Read a header of NIfTI-1 or NIfTI-2.

    Its extensions are not read, because they may state any size. Raises DataError if the file is
    only the header of a pair of .hdr and .img.
    """
    from nibabel import Nifti1Header, Nifti2Header

    start = file.read(Nifti2Header.sizeof_hdr)
    kind = Nifti1Header
    if Nifti2Header.may_contain_header(start):
        kind = Nifti2Header
    header = kind(start[: kind.sizeof_hdr])
    if not header["magic"].item().startswith(MAGIC):
        raise DataError(
            f"{path} is only the header of a pair of files, .hdr and .img: convert the pair to "
            ".nii.gz."
        )
    return header


def shape_of(header: Any, path: Path) -> tuple[int, int, int]:
    """Return the shape of the stored values.

    Raises DataError unless they are one grey volume within the limits.
    """
    sides = [int(side) for side in header.get_data_shape()]
    kind = header.get_data_dtype()
    offset = header.get_data_offset()
    if math.prod(sides[3:]) > 1:
        count = math.prod(sides[3:])
        raise DataError(
            f"{path} contains {count} volumes (4-D): choose one volume, or compute their mean, and "
            "save the result in a separate file."
        )
    if kind.kind not in "iuf" or kind.itemsize > LARGEST_VALUE:
        raise DataError(
            f"{path} has {header.get_value_label('datatype')} values: save it in grey, as float32 "
            "or int16."
        )
    if not 0 <= offset <= FARTHEST_OFFSET:
        raise DataError(
            f"{path} has {offset:,} bytes before its values: save it without header extensions."
        )
    width, depth, height = [*sides, 1, 1, 1][:3]
    check_volume(str(path), (width, depth, height), kind.itemsize)
    return width, depth, height


def canonical_axes(values: np.ndarray, header: Any) -> np.ndarray:
    """Return a view of the values, with reordered and flipped axes.

    The new axes point as nearly as possible to the right, to the front and to the top of the body
    (RAS+).
    """
    from nibabel import as_closest_canonical
    from nibabel.spatialimages import SpatialImage

    turned = as_closest_canonical(SpatialImage(values, header.get_best_affine()))
    return np.asanyarray(turned.dataobj)
