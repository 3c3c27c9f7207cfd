"""Grids of images as PNG files."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from sfumato.storage.files import replace_file

if TYPE_CHECKING:  # functions that need torch import it, so this module loads fast
    from torch import Tensor

WIDEST_NAME = 320  # Maximum width of a name in a grid, in pixels


def to_grid(images: Tensor | np.ndarray, columns: int, smallest: int = 48) -> np.ndarray:
    """Arrange images in a grid, (H', W', C) uint8, on a white background.

    images: (N, C, H, W) float, clamped to [0, 1]; NaN is shown as black;
    smallest: minimum number of pixels per side. Smaller images are magnified by a whole number.
    """
    import torch

    array = (
        torch.as_tensor(images)
        .detach()
        .float()
        .cpu()
        .nan_to_num(0.0)
        .clamp(0, 1)
        .mul(255)
        .round()
        .byte()
        .numpy()
    )
    count, channels, height, width = array.shape
    factor = max(1, math.ceil(smallest / min(height, width)))
    # (N, fH, fW, C)
    array = array.transpose(0, 2, 3, 1).repeat(factor, axis=1).repeat(factor, axis=2)
    height, width = array.shape[1:3]
    columns = max(1, min(columns, count))
    gap = 2  # pixels between images
    rows = math.ceil(count / columns)
    grid = np.full(
        (rows * (height + gap) + gap, columns * (width + gap) + gap, channels), 255, dtype=np.uint8
    )
    for i, image in enumerate(array):
        top = gap + i // columns * (height + gap)
        left = gap + i % columns * (width + gap)
        grid[top : top + height, left : left + width] = image
    return grid


def named_grid(images: Tensor, names: Sequence[str], columns: int, smallest: int) -> np.ndarray:
    """Arrange a row of `columns` images for each name, which is printed to the left of the row.

    A long name is cut. A name with letters that the font lacks is replaced by the row's number.

    images: see `to_grid`.
    """
    from matplotlib import get_data_path  # slow import
    from matplotlib.ft2font import FT2Font

    grid = to_grid(images, columns, smallest)
    letters = 18  # pixels
    file = Path(get_data_path(), "fonts/ttf/DejaVuSans.ttf")
    font = ImageFont.truetype(file, letters)
    drawable = FT2Font(str(file)).get_charmap().keys()
    texts = []
    for row, name in enumerate(names):
        text = name
        if not drawable >= {*map(ord, name)}:
            text = str(row)
        while font.getlength(text) > WIDEST_NAME:
            text = f"{text.removesuffix('…')[:-1]}…"
        texts.append(text)
    width = int(max(map(font.getlength, texts))) + letters
    canvas = Image.fromarray(
        np.pad(grid, ((0, 0), (width, 0), (0, 0)), constant_values=255).squeeze()
    )
    for row, text in enumerate(texts):
        middle = (row + 0.5) * len(grid) / len(names)
        ImageDraw.Draw(canvas).text(
            (letters // 2, middle), text, 0 if canvas.mode == "L" else "black", font, "lm"
        )
    return np.asarray(canvas)


def save_png(path: Path, array: np.ndarray, xmp: str | None = None) -> None:
    """Write (H, W), (H, W, 1) or (H, W, 3) uint8 as a PNG, unchanged. xmp: metadata to embed."""
    replace_file(path, png_bytes(array, xmp))


def png_bytes(array: np.ndarray, xmp: str | None = None) -> bytes:
    """Encode (H, W), (H, W, 1) or (H, W, 3) uint8 as a PNG.

    xmp: XMP packet, embedded as the XMP standard defines.
    """
    pixels = array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array
    info = PngInfo()
    content = io.BytesIO()
    if xmp is not None:
        info.add_itxt("XML:com.adobe.xmp", xmp)
    Image.fromarray(pixels).save(content, format="PNG", pnginfo=info)
    return content.getvalue()
