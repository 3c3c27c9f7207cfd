"""Distort the images of a hold-out.

The distortions are public and the same for all data sets. They were not tuned to any result.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.release.variation import blurred
from sfumato.training.supervised import apply


def displaced(images: Tensor, angle: float, part: float) -> Tensor:
    """Rotate images by `angle` degrees about the centre, and shift them by `part` of their sides.

    The shift is to the right and down. Pixels at the edges are repeated.
    """
    sine = math.sin(math.radians(angle))
    cosine = math.cos(math.radians(angle))
    back = -2 * part
    # A rotation needs this ratio, because `affine_grid` measures positions in units of the sides
    upright = images.shape[2] / images.shape[3]
    theta = torch.tensor(
        [[cosine, -sine * upright, back], [sine / upright, cosine, back]], device=images.device
    )
    grid = F.affine_grid(theta.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "brighter": lambda images: 1.2 * images + 0.1,
    "blurred": blurred,
    "moved": lambda images: displaced(images, 0.0, 1 / 14),
    "turned": lambda images: displaced(images, 10.0, 0.0),
}


def shifted(name: str, images: np.ndarray) -> np.ndarray:
    """Apply one of SHIFTS to (N, H, W, C) uint8 images; shape and type do not change."""
    rows = apply(
        lambda part: SHIFTS[name](part).clamp(0, 1).mul(255).round().permute(0, 2, 3, 1),
        images,
        "cpu",
    )
    return rows.astype(np.uint8)
