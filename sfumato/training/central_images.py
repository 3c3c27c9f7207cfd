"""Make a training set of released central images: clamp, blur, upsample, label. All of it is free post-processing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy.ndimage import median_filter
from torch import Tensor

from sfumato.data.images import Shape, load_array
from sfumato.errors import DataError

MEDIAN = 3  # pixels: side of the window of the median blur


def central_training_set(
    released: Tensor, statistic: str, shape: tuple[int, int, int], median: int = MEDIAN
) -> tuple[Tensor, Tensor]:
    """Images and labels of all releases.

    released: the result of `query_central`, (R, M, C, H', W') or, for the mode, (R, M, bins, C, H', W'); shape:
    (C, H, W) of the sensitive images; median: side of the blur's window, odd; 1 for no blur.
    Returns ((R·M, C, H, W) float32 in [0, 1], (R·M,) int64).
    """
    images = finish_images(mode_images(released) if statistic == "mode" else released, shape[1:], median)
    repeats, classes = images.shape[:2]
    return images.flatten(0, 1), torch.arange(classes).repeat(repeats)


def load_central(directory: Path, shape: Shape, median: int = MEDIAN) -> tuple[Tensor, Tensor]:
    """The training set of what `stage central` wrote, mean.npy or mode.npy; arguments and result as above."""
    released = directory / ("mode.npy" if (directory / "mode.npy").is_file() else "mean.npy")
    images = np.array(load_array(released))
    if images.dtype != np.float32 or not np.isfinite(images).all():
        raise DataError(f"{released} holds no finite float32 numbers: run `stage central` again")
    if images.ndim != (6 if released.stem == "mode" else 5) or images.shape[-3] != shape[0] or 0 in images.shape:
        raise DataError(f"{released} is {images.shape}, of other images than {shape}: run `stage central` again")
    return central_training_set(torch.from_numpy(images), released.stem, shape, median)


def mode_images(histograms: Tensor) -> Tensor:
    """Midpoint of each pixel's fullest bin: (R, M, bins, C, H, W) -> (R, M, C, H, W) in [0, 1]. Free."""
    return (histograms.argmax(dim=2).float() + 0.5) / histograms.shape[2]


def finish_images(images: Tensor, size: tuple[int, int], median: int = 1) -> Tensor:
    """Clamp to [0, 1], median blur, upsample: (R, M, C, H', W') -> (R, M, C, *size). Free."""
    flat = median_blur(images.flatten(0, 1).clamp(0, 1), median)
    if flat.shape[-2:] != tuple(size):
        flat = F.interpolate(flat, size=tuple(size), mode="bilinear", align_corners=False)
    return flat.unflatten(0, images.shape[:2])


def median_blur(images: Tensor, side: int) -> Tensor:
    """Median over a side × side window of each channel, edges repeated: (B, C, H, W) -> (B, C, H, W). side: odd."""
    return torch.from_numpy(median_filter(images.numpy(), (1, 1, side, side), mode="nearest"))
