"""Make a training set of released central images: clamp, blur, label. All of it is free post-processing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from scipy.ndimage import median_filter
from torch import Tensor

from sfumato.data.images import Shape, load_array
from sfumato.errors import DataError

MEDIAN = 3  # pixels: side of the window of the median blur


def load_central(directory: Path, shape: Shape) -> tuple[Tensor, Tensor]:
    """Images and labels of all releases of `stage central`: ((R·M, C, H, W) float32 in [0, 1], (R·M,) int64).

    shape: (C, H, W) of the sensitive images. Raises DataError for a release of another shape.
    """
    file = directory / ("mode.npy" if (directory / "mode.npy").is_file() else "mean.npy")
    released = torch.from_numpy(np.array(load_array(file)))
    if released.dtype != torch.float32 or not released.isfinite().all():
        raise DataError(f"{file} holds no finite float32 numbers: run `stage central` again")
    if released.ndim != (6 if file.stem == "mode" else 5) or released.shape[-3:] != shape or 0 in released.shape:
        raise DataError(f"{file} is {(*released.shape,)}, of other images than {shape}: run `stage central` again")
    if file.stem == "mode":
        released = mode_images(released)
    repeats, classes = released.shape[:2]
    return blurred(released.flatten(0, 1).clamp(0, 1)), torch.arange(classes).repeat(repeats)


def mode_images(histograms: Tensor) -> Tensor:
    """Midpoint of each pixel's fullest bin: (R, M, bins, C, H, W) -> (R, M, C, H, W) in [0, 1]. Free."""
    return (histograms.argmax(dim=2).float() + 0.5) / histograms.shape[2]


def blurred(images: Tensor) -> Tensor:
    """The median blur of each channel: (N, C, H, W), the same shape. Free."""
    return torch.from_numpy(median_filter(images.numpy(), (1, 1, MEDIAN, MEDIAN), mode="nearest"))
