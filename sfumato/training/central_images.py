"""From released central images to a training set: clamp, blur, upsample, label. All of it is post-processing, free to repeat."""

from __future__ import annotations

import torch
from torch import Tensor

from sfumato.queries.central import finish_images, mode_images


def central_training_set(released: Tensor, statistic: str, shape: tuple[int, int, int], median: int) -> tuple[Tensor, Tensor]:
    """Images and labels of all releases.

    released: what `query_central` gave, (R, M, C, H', W') or, for the mode, (R, M, bins, C, H', W'); shape: (C, H, W) of the
    sensitive images; median: side of the blur's window. Returns ((R·M, C, H, W) float32 in [0, 1], (R·M,) int64).
    """
    images = finish_images(mode_images(released) if statistic == "mode" else released, shape[1:], median)
    repeats, classes = images.shape[:2]
    return images.flatten(0, 1), torch.arange(classes).repeat(repeats)
