"""From released central images to a training set: clamp, blur, upsample, label. All of it is post-processing, free to repeat."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def central_training_set(
    released: Tensor, statistic: str, shape: tuple[int, int, int], median: int
) -> tuple[Tensor, Tensor]:
    """Images and labels of all releases.

    released: what `query_central` gave, (R, M, C, H', W') or, for the mode, (R, M, bins, C, H', W'); shape: (C, H, W) of the
    sensitive images; median: side of the blur's window. Returns ((R·M, C, H, W) float32 in [0, 1], (R·M,) int64).
    """
    images = finish_images(mode_images(released) if statistic == "mode" else released, shape[1:], median)
    repeats, classes = images.shape[:2]
    return images.flatten(0, 1), torch.arange(classes).repeat(repeats)


def mode_images(histograms: Tensor) -> Tensor:
    """Midpoint of each pixel's fullest bin: (R, M, bins, C, H, W) -> (R, M, C, H, W) in [0, 1]. Post-processing, free."""
    return (histograms.argmax(dim=2).float() + 0.5) / histograms.shape[2]


def finish_images(images: Tensor, size: tuple[int, int], median: int = 0) -> Tensor:
    """Post-processing, free: clamp to [0, 1], median blur, upsample: (R, M, C, H', W') -> (R, M, C, *size).

    median: side of the blur's window, odd; 0 or 1 for none.
    """
    flat = median_blur(images.flatten(0, 1).clamp(0, 1), median)
    if flat.shape[-2:] != tuple(size):
        flat = F.interpolate(flat, size=tuple(size), mode="bilinear", align_corners=False)
    return flat.unflatten(0, images.shape[:2])


def median_blur(images: Tensor, side: int) -> Tensor:
    """Median over a side × side window of each channel, edges repeated: (B, C, H, W) -> (B, C, H, W)."""
    if side <= 1:
        return images
    if side % 2 == 0:
        raise ValueError(f"median={side}: the window needs an odd side, or 0 for no blur")
    padded = F.pad(images, [side // 2] * 4, mode="replicate")
    windows = padded.unfold(2, side, 1).unfold(3, side, 1).flatten(4)  # (B, C, H, W, side²)
    return windows.median(dim=4).values
