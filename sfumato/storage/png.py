"""Grids of images and plots, as PNG files. Nothing here decides what is released."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sfumato.storage.files import replace_file

SMALLEST = 48  # pixels of a side, below which an image is magnified in a grid
OUTSIDE = "(network)"  # the row of the heat map for layers outside every block


def to_grid(images: Tensor | np.ndarray, columns: int) -> np.ndarray:
    """Images side by side, row by row, for looking at.

    images: (N, C, H, W) float, clamped to [0, 1], NaN shown black. An image with a side under SMALLEST pixels is
    magnified by a whole number, without smoothing. Returns (H', W', C) uint8 on a white ground.
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


class Ranked(Protocol):
    """A candidate with its noisy gradient norm: the debiased square of it, and the rank by that."""

    @property
    def name(self) -> str: ...
    @property
    def debiased(self) -> float: ...
    @property
    def rank(self) -> int: ...


def split_name(name: str) -> tuple[str, str]:
    """Block and projection of a candidate.

    `down.1.attention.q` -> (`down.1`, `q`), `down.1.block.conv1` -> (`down.1`, `conv1`).
    """
    found = re.fullmatch(r"(?:(.*)\.)?([^.]*[^.\d][^.]*(?:\.\d+)*)", name)
    block, projection = (found[1] or OUTSIDE, found[2]) if found else (OUTSIDE, name)
    return block.removesuffix(".attention").removesuffix(".block"), projection


def plot_saliency(rows: Sequence[Ranked], path: Path) -> None:
    """Draw the noisy gradient norms as a heat map, blocks by projections, with the rank of each candidate.

    The colour is the square root of the debiased squared norm, 0 where that is negative: no signal above the noise.
    """
    from matplotlib.figure import Figure  # heavy: only when used

    cells = {split_name(row.name): row for row in rows}
    blocks, projections = (list(dict.fromkeys(key[axis] for key in cells)) for axis in (0, 1))
    values = {key: max(row.debiased, 0) ** 0.5 for key, row in cells.items()}
    grid = [[values.get((block, projection), float("nan")) for block in blocks] for projection in projections]
    widest = max(map(len, blocks))
    turned = widest > 9
    margin = 0.075 * widest * turned
    width, height = max(4.6, 2.6 + 0.62 * len(blocks)), max(2.3, 1.5 + 0.5 * len(projections) + margin)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("#eeeeee")  # no such candidate
    largest = max(values.values()) or 1.0
    image = axes.imshow(grid, cmap="YlGnBu", vmin=0, vmax=largest, aspect="auto")
    for (block, projection), row in cells.items():
        x, y = blocks.index(block), projections.index(projection)
        dark = values[block, projection] > 0.55 * largest
        axes.text(x, y, str(row.rank), ha="center", va="center", fontsize=9, color="white" if dark else "#253d5b")
    axes.set_xticks(range(len(blocks)), blocks, rotation=90 if turned else 0, fontsize=8)
    axes.set_yticks(range(len(projections)), projections, fontsize=9)
    axes.set_xticks([x - 0.5 for x in range(1, len(blocks))], minor=True)
    axes.set_yticks([y - 0.5 for y in range(1, len(projections))], minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(f"Noisy gradient norms of {len(rows)} candidates; numbers are ranks", fontsize=9, loc="left")
    figure.colorbar(image, ax=axes, label="gradient norm, debiased", pad=0.02)
    figure.savefig(path, dpi=150, metadata={"Software": None})
