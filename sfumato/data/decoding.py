"""Decode picture files into arrays of the requested size and channels, in several threads.

The results do not depend on the number of threads.
"""

import errno
import io
import os
import sys
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image, ImageMode, ImageOps, UnidentifiedImageError

from sfumato.data.deep import (
    TRANSPARENT,
    Span,
    decode_deep,
    decode_dicom,
    decode_tiff,
    is_dicom,
    readable,
)
from sfumato.data.formats import HEAD, AnotherFormat, Format, format_of, link_format
from sfumato.data.volumes import Slice, decode_slice
from sfumato.errors import DataError
from sfumato.storage.files import reading
from sfumato.storage.limits import check_picture, check_picture_file, room_for_picture

# Several threads help, because Pillow and NumPy release the GIL while they decode and resize. More
# than 16 threads would only wait for the single thread that writes their results.
DECODERS = min(16, os.cpu_count() or 1)


@dataclass(frozen=True)
class Member:
    """A picture inside a tar file, read in place without unpacking."""

    shard: Path
    start: int  # offset of the picture in the tar file, in bytes
    size: int
    name: str

    @property
    def parent(self) -> Path:
        return self.shard

    def opened(self) -> io.BytesIO:
        """Return the bytes of the picture.

        Raises OSError if the tar file has become shorter since it was listed.
        """
        check_picture_file(str(self), self.size)
        with reading(self.shard) as file:
            file.seek(self.start)
            content = file.read(self.size)
            if len(content) < self.size:
                raise OSError(errno.EIO, "File became shorter while it was read", str(self.shard))
            return io.BytesIO(content)

    def __str__(self) -> str:
        return f"{self.name} in {self.shard}"


PictureFile = Path | Member | Slice


@dataclass(frozen=True, kw_only=True)
class PictureForm:
    """The size, channels and range of values to which pictures are converted.

    converted: number of images by kind of conversion, such as cropping. Private.
    """

    size: tuple[int, int] | None = None  # height and width; None: as in the source
    channels: int | None = None  # 1 (grey) or 3 (colour); None: as in the source
    # Values to show as black and as white, for files with more than 8 bits
    range: Span | None = None
    # Whether images with other proportions than `size` get black bars, instead of being cropped
    pad: bool = False
    converted: Counter[str] = field(default_factory=Counter)


def read_whole(path: Path) -> io.BytesIO:
    """Return all bytes of a picture file.

    The file is read before it is decoded, because some decoders report a failed read as damage.
    """
    with reading(path) as file:
        check_picture_file(str(path), os.fstat(file.fileno()).st_size)
        return io.BytesIO(file.read())


def open_picture(file: Path | Member) -> io.BytesIO:
    """Return the bytes of a picture file, or of a picture inside a tar file."""
    if isinstance(file, Path):
        return read_whole(file)
    return file.opened()


def format_at(file: Path | Member) -> Format | None:
    """Return the unsupported format of a file, or None.

    The format is recognised by the file's first bytes or, for a link to a missing file, by the
    link's target.
    """
    if isinstance(file, Path) and not file.is_file():
        return link_format(file)
    if not isinstance(file, Path):
        return format_of(file.opened().read(HEAD))
    with reading(file) as stream:
        return format_of(stream.read(HEAD))


@contextmanager
def naming_formats(file: Path | Member) -> Iterator[None]:
    """Return a context that replaces a DataError by AnotherFormat if `format_at` finds a format."""
    try:
        yield
    except DataError as error:
        if error.option is None and (form := format_at(file)):
            raise AnotherFormat(str(file), form) from error
        raise


def fit(image: np.ndarray, form: PictureForm, name: str) -> np.ndarray:
    """Convert one image, (H, W, C) uint8, to the channels and the size that `form` states.

    If its proportions differ, the image is cropped or padded.
    """
    height, width, channels = image.shape
    if not height or not width:
        raise DataError(f"{name} has no pixels ({height}×{width}): remove it.")
    check_picture(name, height, width, channels)
    if form.size in (None, (height, width)) and form.channels in (None, channels):
        return np.ascontiguousarray(image)
    if channels == 3 and form.channels == 1 and (image != image[..., :1]).any():
        form.converted["colour pictures made grey"] += 1
    if form.size is not None and height * form.size[1] != width * form.size[0]:
        form.converted["padded with black" if form.pad else "cropped to the middle"] += 1
    picture = Image.fromarray(np.ascontiguousarray(image[..., 0] if channels == 1 else image))
    if form.channels is not None:
        picture = picture.convert("L" if form.channels == 1 else "RGB")
    if form.size is not None:
        fitted = ImageOps.pad if form.pad else ImageOps.fit
        picture = fitted(picture, form.size[::-1], Image.Resampling.LANCZOS)
    return np.atleast_3d(np.asarray(picture))


def decode(path: PictureFile, span: Span | None = None) -> np.ndarray:
    """Decode a picture file into (H, W, 1) or (H, W, 3) uint8.

    The picture is turned upright, and transparent parts are drawn over black.

    span: values to show as black and as white, for files with more than 8 bits (see `eight_bits`).
    """
    if isinstance(path, Slice) and path.axis is None:
        return decode_dicom(path.path, span, path.number)
    if isinstance(path, Slice):
        return decode_slice(path, span)
    if isinstance(path, Path) and is_dicom(path):
        return decode_dicom(path, span)
    # The list leaves out formats that contain programs, such as PostScript; formats from which
    # Pillow silently drops the low bits; and ICO, because Pillow decodes it before its size can be
    # checked.
    formats = "AVIF BMP DIB GIF JPEG JPEG2000 PCX PNG PPM QOI TGA TIFF WEBP"
    Image.init()
    # Formats that the installed Pillow supports
    supported = [form for form in formats.split() if form in Image.OPEN]
    with (
        naming_formats(path),
        readable(f"{path} cannot be read as an image"),
        open_picture(path) as file,
    ):
        try:
            picture = Image.open(file, formats=supported)
        except Image.DecompressionBombError as error:
            raise DataError(
                f"{path} is too large ({error}): reduce its size, or remove it."
            ) from error
        except UnidentifiedImageError:
            file.seek(0)
            # Replaces Pillow's message, which would show the memory address of the stream
            if file.read(4) not in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
                raise ValueError(
                    "its content is in no supported format; PNG and DICOM, for example, are "
                    "supported"
                ) from None
            return decode_tiff(file, span, str(path))
        # `is_animated` is used instead of `n_frames`, which would read all frames. In an MPO, only
        # the first frame is used: the others are previews of a phone's photograph, or other views
        # of the scene
        if getattr(picture, "is_animated", False) and picture.format != "MPO":
            raise DataError(
                f"{path} contains several frames: choose one, and save it in a separate file."
            )
        with room_for_picture(str(path), picture.height, picture.width, *pixel_form(picture)):
            if (pixels := decode_deep(picture, file, span, str(path))) is not None:
                return pixels
            return flattened(picture, str(path))


def pixel_form(picture: Image.Image) -> tuple[int, int]:
    """Return the number of channels and the bytes per value of a picture after decoding."""
    if picture.has_transparency_data or picture.mode == "P":
        return 4, 1
    channels = len(picture.getbands())
    # Such a tile has 16 bits per value. Pillow would keep only 8 of them; `decode_deep` keeps all.
    if any(str(tile.args).endswith("16B") for tile in getattr(picture, "tile", ())):
        return channels, 2
    return channels, np.dtype(ImageMode.getmode(picture.mode).typestr).itemsize


def flattened(picture: Image.Image, name: str) -> np.ndarray:
    """Convert a picture of 8 bits per value to (H, W, 1) or (H, W, 3) uint8.

    The picture is turned upright, and transparent parts are drawn over black.
    """
    ImageOps.exif_transpose(picture, in_place=True)
    if picture.has_transparency_data:
        mode = "L" if picture.mode in ("LA", "La", "L", "1") else "RGB"
        picture = picture.convert("RGBA")
        if picture.getchannel("A").getbbox() is None:
            raise DataError(f"{name} {TRANSPARENT}.")
        black = Image.new("RGBA", picture.size, (0, 0, 0, 255))
        picture = Image.alpha_composite(black, picture).convert(mode)
    if picture.mode not in ("L", "RGB"):
        picture = picture.convert("L" if picture.mode == "1" else "RGB")
    return np.atleast_3d(np.asarray(picture))


def decoded(
    files: Sequence[PictureFile], form: PictureForm
) -> Generator[np.ndarray | DataError, None, None]:
    """Yield one result per file, in the order of `files`.

    The result is the picture, converted as requested, or an error that states why this picture
    cannot be used. An error that concerns other files too, such as a missing setting, is raised.
    """
    for picture, conversions in in_threads(files, form):
        form.converted.update(conversions)
        yield picture


def in_threads(
    files: Sequence[PictureFile], form: PictureForm
) -> Iterator[tuple[np.ndarray | DataError, Counter[str]]]:
    """Yield the results of `picture_of`, computed in DECODERS threads, in the order of `files`."""
    if DECODERS == 1:  # a thread would only add the cost of passing pictures to it
        yield from (picture_of(file, form) for file in files)
        return
    rest = iter(files)
    with ThreadPoolExecutor(DECODERS) as threads:
        busy = deque(threads.submit(picture_of, file, form) for file in islice(rest, 2 * DECODERS))
        while busy:
            yield busy.popleft().result()
            busy.extend(threads.submit(picture_of, file, form) for file in islice(rest, 1))


def with_progress(items: Iterable, total: int, description: str = "preparing") -> Iterator:
    """Yield the items, and show a progress bar if standard error is a terminal.

    A bar in a log would reveal the number of items.
    """
    from rich.console import Console  # imported here, because recipients need not install rich
    from rich.progress import track

    yield from track(
        items, description, total, console=Console(stderr=True), disable=not sys.stderr.isatty()
    )


def picture_of(file: PictureFile, form: PictureForm) -> tuple[np.ndarray | DataError, Counter[str]]:
    """Decode and convert a picture.

    Returns the picture (or an error that concerns only this picture) and the number of conversions
    by kind.
    """
    form = replace(form, converted=Counter())
    try:
        return fit(decode(file, form.range), form, str(file)), form.converted
    except DataError as error:
        if error.option is not None:  # a missing setting, which concerns other files too
            raise
        return error, form.converted
