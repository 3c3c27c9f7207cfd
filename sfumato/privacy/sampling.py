"""Poisson sampling: every image enters a draw independently with the same probability."""

from __future__ import annotations

import numpy as np


def poisson_draw(generator: np.random.Generator, size: int, sample_rate: float) -> np.ndarray:
    """Indices of one Poisson draw out of `size` images, ascending: (n,) int64. n varies and can be 0.

    The number of images is binomial, and the subset uniform given its size: the same law as one coin per image, in
    memory that grows with the draw instead of the set. A rate of 1 takes every image.
    """
    if sample_rate >= 1 or not size:
        return np.arange(size, dtype=np.int64)
    drawn = generator.binomial(size, sample_rate)
    return np.sort(generator.choice(size, size=drawn, replace=False, shuffle=False)).astype(np.int64)
