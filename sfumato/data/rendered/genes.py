"""Genes: numbers in [0, 1) that replace the random stream of a drawing.

A label and its genes determine the image. If a gene changes a little, the image usually changes
only a little.
Sources: the primary sample space (Kelemen et al. 2002), and its use in Private Evolution (Sim-PE,
Lin et al. 2025).
"""

from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri


class Genes:
    """A substitute for the random stream of drawing functions.

    It returns the numbers in `values`, (n,) in [0, 1), and then numbers from a fixed random stream.
    `read` counts the numbers that it has returned.
    """

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.read = 0
        self.beyond = np.random.default_rng(0)

    def random(self, size: int | Sequence[int] = ()) -> np.ndarray:
        number = int(np.prod(size))
        genes = self.values[self.read : self.read + number]
        self.read += number
        drawn = np.concatenate([genes, self.beyond.random(number - len(genes))])
        # `[()]` turns an array of shape () into a number
        return drawn.reshape(size)[()]  # type: ignore[no-any-return]

    def uniform(self, low=0.0, high=1.0, size: int | Sequence[int] | None = None) -> np.ndarray:
        shape = size or np.broadcast_shapes(np.shape(low), np.shape(high))
        return low + (np.asarray(high) - low) * self.random(shape)

    def integers(self, low: int, high: int | None = None) -> int:
        if high is None:
            return self.integers(0, low)
        return low + min(int(self.random() * (high - low)), high - low - 1)

    def choice(self, values: Sequence[float]) -> float:
        return values[self.integers(len(values))]

    def standard_normal(self, size: int | Sequence[int]) -> np.ndarray:
        return ndtri(self.random(size).clip(1e-9, 1 - 1e-9))
