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


def load_central(directory: Path, shape: Shape, median: int = MEDIAN) -> tuple[Tensor, Tensor]:
    """Images and labels of all releases of `stage central`: ((R·M, C, H, W) float32 in [0, 1], (R·M,) int64).

    shape: (C, H, W) of the sensitive images; median: side of the blur's window, odd; 1 for no blur.
    """
    file = directory / ("mode.npy" if (directory / "mode.npy").is_file() else "mean.npy")
    released = torch.from_numpy(np.array(load_array(file)))
    if released.dtype != torch.float32 or not released.isfinite().all():
        raise DataError(f"{file} holds no finite float32 numbers: run `stage central` again")
    if released.ndim != (6 if file.stem == "mode" else 5) or released.shape[-3] != shape[0] or 0 in released.shape:
        raise DataError(f"{file} is {(*released.shape,)}, of other images than {shape}: run `stage central` again")
    images = finish_images(mode_images(released) if file.stem == "mode" else released, shape[1:], median)
    repeats, classes = images.shape[:2]
    return images.flatten(0, 1), torch.arange(classes).repeat(repeats)


def mode_images(histograms: Tensor) -> Tensor:
    """Midpoint of each pixel's fullest bin: (R, M, bins, C, H, W) -> (R, M, C, H, W) in [0, 1]. Free."""
    return (histograms.argmax(dim=2).float() + 0.5) / histograms.shape[2]


def finish_images(images: Tensor, size: tuple[int, int], median: int = 1) -> Tensor:
    """Clamp to [0, 1], median blur of each channel, upsample: (R, M, C, H', W') -> (R, M, C, *size). Free."""
    clamped = images.flatten(0, 1).clamp(0, 1)
    flat = torch.from_numpy(median_filter(clamped.numpy(), (1, 1, median, median), mode="nearest"))
    if flat.shape[-2:] != tuple(size):
        flat = F.interpolate(flat, size=tuple(size), mode="bilinear", align_corners=False)
    return flat.unflatten(0, images.shape[:2])
