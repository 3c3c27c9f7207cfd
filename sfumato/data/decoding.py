"""A picture file as an array, made to fit; many of them in several processes, which change nothing but the time.

Those processes import this module and no more, so it is light.
"""

import io
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from subprocess import DEVNULL, Popen
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from sfumato.data.deep import TRANSPARENT, Span, decode_deep, decode_dicom, decode_tiff, is_dicom, readable
from sfumato.errors import DataError, explained

Request = Any  # of `sfumato.data.sources.source`, which imports this module
# one that writes keeps no more busy; macOS does not tell which processors may be used
PROCESSES = min(16, len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)))
ALONE = 0.5  # seconds of decoding after which other processes join, if as much is left: they take 0.2 to begin
TURN = 0.05  # seconds of decoding that a process gets at once
# Formats of plain pictures. Left out are those that hold programs, such as PostScript, which other programs would run,
# and those of which Pillow cuts the low bits in silence.
FORMATS = "AVIF BMP DIB GIF ICO JPEG PCX PNG PPM QOI TGA TIFF WEBP"


@dataclass(frozen=True)
class Member:
    """A picture within a tar file, which is read where it lies: nothing is unpacked."""

    shard: Path
    start: int  # of its bytes in the file
    size: int
    name: str

    def opened(self) -> io.BytesIO:
        with self.shard.open("rb") as file:
            file.seek(self.start)
            return io.BytesIO(file.read(self.size))

    def __str__(self) -> str:
        return f"{self.name} in {self.shard}"


def fit(image: np.ndarray, request: Request, name: str) -> np.ndarray:
    """One image, (H, W, C) uint8, with the channels and the size of `request`: cropped to the middle, or padded."""
    height, width, channels = image.shape
    if not height or not width:
        raise DataError(f"{name} has no pixels ({height}×{width}): remove it.")
    if request.size in (None, (height, width)) and request.channels in (None, channels):
        return np.ascontiguousarray(image)
    if channels == 3 and request.channels == 1 and (image != image[..., :1]).any():
        request.converted["colour pictures made grey"] += 1
    if request.size is not None and height * request.size[1] != width * request.size[0]:
        request.converted["padded with black" if request.pad else "cropped to the middle"] += 1
    picture = Image.fromarray(np.ascontiguousarray(image[..., 0] if channels == 1 else image))
    if request.channels is not None:
        picture = picture.convert("L" if request.channels == 1 else "RGB")
    if request.size is not None:
        fitted = ImageOps.pad if request.pad else ImageOps.fit
        picture = fitted(picture, request.size[::-1], Image.Resampling.LANCZOS)
    return np.atleast_3d(np.asarray(picture))


def decode(path: Path | Member, span: Span | None = None) -> np.ndarray:
    """A picture file as (H, W, 1) or (H, W, 3) uint8: upright, transparency over black.

    span: shows files with more than 8 bits, as `shown` does.
    """
    if isinstance(path, Path) and is_dicom(path):
        return decode_dicom(path, span)
    Image.init()
    known = [form for form in FORMATS.split() if form in Image.OPEN]  # what this Pillow was built with
    with (
        readable(f"{path} cannot be read as an image"),
        path.open("rb") if isinstance(path, Path) else path.opened() as file,
    ):
        try:
            opened = Image.open(file, formats=known)
        except UnidentifiedImageError:
            file.seek(0)
            if file.read(4) not in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):  # Pillow names a place in this program
                raise ValueError("its bytes are those of no picture read here, as PNG and DICOM are") from None
            return decode_tiff(file, span, str(path))
        if (frames := getattr(opened, "n_frames", 1)) > 1:
            raise DataError(f"{path} holds {frames} frames: save the one to use as a picture of its own.")
        if (shown := decode_deep(opened, file, span, str(path))) is not None:
            return shown
        picture: Image.Image = ImageOps.exif_transpose(opened)
    if picture.has_transparency_data:
        mode = "L" if picture.mode in ("LA", "La", "L", "1") else "RGB"
        picture = picture.convert("RGBA")
        if picture.getchannel("A").getbbox() is None:
            raise DataError(f"{path} {TRANSPARENT}.")
        black = Image.new("RGBA", picture.size, (0, 0, 0, 255))
        picture = Image.alpha_composite(black, picture).convert(mode)
    return np.atleast_3d(np.asarray(picture.convert("L" if picture.mode in ("1", "L") else "RGB")))


def decoded(files: Sequence[Path | Member], request: Request) -> Generator[np.ndarray | DataError, None, None]:
    """Each picture as `request` asks, or why it cannot be used, in the order of `files`.

    Raises what is wrong with more than a picture; DataError if a process ends by itself.
    """
    for picture in pictures(files, request):
        if isinstance(picture, Exception) and type(picture) is not DataError:
            raise picture
        yield picture


def pictures(files: Sequence[Path | Member], request: Request) -> Iterator[Any]:
    spent = 0.0
    for number, file in enumerate(files, 1):
        began = time.perf_counter()
        picture = picture_of(file, request)
        spent += time.perf_counter() - began
        yield picture
        left = (len(files) - number) * spent / number
        if min(spent, left) >= ALONE and PROCESSES > 1 and os.getloadavg()[0] < PROCESSES:  # else others wait too
            size = max(1, int(TURN * number / spent))
            chunks = (files[start : start + size] for start in range(number, len(files), size))
            return (yield from by_processes(chunks, request))


def by_processes(chunks: Iterator[Sequence[Path | Member]], request: Request) -> Iterator[Any]:
    """The pictures of all chunks, of which each process has one at a time."""
    place: Path | Member = Path()
    ended = "a process that decodes pictures ended by itself, at {} or soon after: is there enough memory?"
    with explained(DataError, lambda _: ended.format(place), causes=(EOFError, OSError)), ExitStack() as stack:
        busy = deque((stack.enter_context(process(request, chunk)), chunk) for chunk in islice(chunks, PROCESSES))
        while busy:
            channel, (place, *_) = busy.popleft()
            answers, converted = channel.recv()
            if following := next(chunks, None):
                channel.send(following)
                busy.append((channel, following))
            request.converted.update(converted)
            yield from answers


@contextmanager
def process(request: Request, first: Sequence[Path | Member]) -> Iterator[Connection]:
    """A process that decodes, in a group of its own: a signal to this one's, as Ctrl-C is, reaches this one only.

    It imports nothing of the program that began it, and ends when the other end of its socket does.
    """
    ours, theirs = Pipe()
    words = [sys.executable, "-P", "-c", f"from {__name__} import answer; answer({theirs.fileno()})"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    ways: dict[str, Any] = {"pass_fds": [theirs.fileno()], "stdin": DEVNULL, "process_group": 0}
    with ours, Popen(words, env=environment, **ways) as begun:
        theirs.close()
        try:
            ours.send({name: getattr(request, name) for name in ("size", "channels", "range", "pad")})
            ours.send(first)
            yield ours
        finally:
            begun.kill()


def answer(socket: int) -> None:
    """Decode what comes through the socket, until its other end is closed."""
    channel = Connection(socket)
    with suppress(EOFError, OSError):
        request: Any = SimpleNamespace(**channel.recv(), converted=Counter())
        while True:
            channel.send(([picture_of(file, request) for file in channel.recv()], request.converted))
            request.converted.clear()


def picture_of(file: Path | Member, request: Request) -> np.ndarray | Exception:
    try:
        return fit(decode(file, request.range), request, str(file))
    except Exception as error:
        return error
