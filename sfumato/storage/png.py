"""Grids of images as PNG files. Nothing here decides what is released."""

import io
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sfumato.storage.files import replace_file

SMALLEST = 48  # pixels of a side, below which an image is magnified in a grid


def to_grid(images: Tensor | np.ndarray, columns: int) -> np.ndarray:
    """Images side by side, row by row, as (H', W', C) uint8 on a white ground; small ones are magnified.

    images: (N, C, H, W) float, clamped to [0, 1], NaN shown black.
    """
    array = torch.as_tensor(images).detach().float().cpu().nan_to_num(0.0).clamp(0, 1).mul(255).round().byte().numpy()
    count, channels, height, width = array.shape
    factor, gap = max(1, math.ceil(SMALLEST / min(height, width))), 2
    array = array.transpose(0, 2, 3, 1).repeat(factor, axis=1).repeat(factor, axis=2)  # (N, fH, fW, C)
    columns = max(1, min(columns, count))
    rows, height, width = math.ceil(count / columns), height * factor, width * factor
    grid = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap, channels), 255, dtype=np.uint8)
    for i, image in enumerate(array):
        top, left = gap + i // columns * (height + gap), gap + i % columns * (width + gap)
        grid[top : top + height, left : left + width] = image
    return grid


def save_png(path: Path, array: np.ndarray, xmp: str | None = None) -> None:
    """Write (H, W), (H, W, 1) or (H, W, 3) uint8 as a PNG, as it is. xmp: metadata to put into it."""
    replace_file(path, png_bytes(array, xmp))


def png_bytes(array: np.ndarray, xmp: str | None = None) -> bytes:
    """(H, W), (H, W, 1) or (H, W, 3) uint8 as a PNG. xmp: an XMP packet, which goes where the XMP standard says."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    pixels = array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array
    info, content = PngInfo(), io.BytesIO()
    if xmp is not None:
        info.add_itxt("XML:com.adobe.xmp", xmp)
    Image.fromarray(pixels).save(content, format="PNG", pnginfo=info)
    return content.getvalue()
