"""A folder of pictures, one folder per class."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sfumato.data.images import GROUPS, GROUPS_REFUSED
from sfumato.data.sources.source import Example, Request, Source, fit
from sfumato.errors import DataError


def read_imagefolder(request: Request, raw: Path) -> Source:
    """A folder with one folder of pictures per class, in the order of their names; hidden files are ignored."""
    path = request.required_path()
    if not path.is_dir():
        raise DataError(f"{request.section}.path={path} is not a folder: expected one folder of pictures per class.")
    entries = visible(path)
    folders = [entry for entry in entries if entry.is_dir()]
    loose = [entry.name for entry in entries if not entry.is_dir() and is_picture(entry)]
    if request.sensitive and (path / GROUPS).exists():
        raise DataError(f"{path / GROUPS} {GROUPS_REFUSED}.")
    if loose:
        raise DataError(f"{path / loose[0]} lies outside a class: move it into a folder named after its class.")
    if not folders:
        raise DataError(f"{request.section}.path={path} is empty: expected one folder of pictures per class.")
    files: list[tuple[Path, int]] = []
    for label, folder in enumerate(folders):
        # A folder without pictures is a class all the same: a refusal would tell that its last picture is gone.
        for picture in visible(folder):
            if picture.is_dir():
                raise DataError(
                    f"{picture} is a folder inside a class: pictures must lie directly in their class's folder."
                )
            files.append((picture, label))
    return Source(tuple(folder.name for folder in folders), pictures_of(files, request), None, len(files))


def visible(folder: Path) -> list[Path]:
    return sorted((entry for entry in folder.iterdir() if not entry.name.startswith(".")), key=lambda entry: entry.name)


def is_picture(path: Path) -> bool:
    from PIL.Image import registered_extensions

    return path.suffix.lower() in registered_extensions()


def pictures_of(files: list[tuple[Path, int]], request: Request) -> Iterator[Example]:
    """Picture files decoded one by one. Raises DataError where size or channels differ from those of the first one."""
    first: tuple[Path, tuple[int, ...]] | None = None
    for path, label in files:
        image = fit(decode(path), request, str(path))
        first = first or (path, image.shape)
        if image.shape != first[1]:
            differs = {"size": image.shape[:2] != first[1][:2], "channels": image.shape[2] != first[1][2]}
            wish = " and ".join(f"{request.section}.{key}" for key, value in differs.items() if value)
            raise DataError(
                f"{path} is {describe(image.shape)} but {first[0]} is {describe(first[1])}: "
                f"set {wish} to convert all alike."
            )
        yield image, label


def describe(shape: tuple[int, ...]) -> str:
    return f"{shape[0]}×{shape[1]} {'grey' if shape[2] == 1 else 'colour'}"


def decode(path: Path) -> np.ndarray:
    """A picture file as (H, W, 1) or (H, W, 3) uint8: upright, 16-bit grey divided by 256, transparency over black."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            if (frames := getattr(opened, "n_frames", 1)) > 1:
                raise DataError(f"{path} holds {frames} frames: save the one to use as a picture of its own.")
            opened.load()
            picture: Image.Image = ImageOps.exif_transpose(opened)
    except (OSError, SyntaxError, ValueError, EOFError, zlib.error, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image ({error}): repair or remove it.") from error
    if picture.mode.startswith("I;16"):
        return (np.asarray(picture).astype(np.uint16) >> 8).astype(np.uint8)[..., None]
    if picture.mode in ("I", "F"):
        raise DataError(
            f"{path} has 32-bit pixels, whose range nothing states: save it with 8 bits, or as 16-bit grey."
        )
    if picture.has_transparency_data:
        mode = "L" if picture.mode in ("LA", "La", "L", "1") else "RGB"
        picture = picture.convert("RGBA")
        black = Image.new("RGBA", picture.size, (0, 0, 0, 255))
        picture = Image.alpha_composite(black, picture).convert(mode)
    array = np.asarray(picture.convert("L" if picture.mode in ("1", "L") else "RGB"))
    return array if array.ndim == 3 else array[..., None]
