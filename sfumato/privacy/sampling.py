"""Poisson sampling.

Every unit, an image or a group, enters a draw independently with the same probability.
"""

from collections.abc import Iterator

import numpy as np

from sfumato.privacy.rows import FLOAT64_SLACK

SEGMENT = 2**16  # Units whose part of a draw is in memory at a time


def poisson_draw(generator: np.random.Generator, size: int, sample_rate: float) -> np.ndarray:
    """Draw one Poisson sample out of `size` units: ascending indices, (n,) int64.

    n varies and can be 0.

    The number of units is binomial, and the subset uniform given its size: the same law as one coin
    per unit, in memory that grows with the draw instead of the set. A rate of 1 takes every unit.
    """
    if sample_rate >= 1 or not size:
        return np.arange(size, dtype=np.int64)
    drawn = generator.binomial(size, sample_rate)
    return np.sort(generator.choice(size, size=drawn, replace=False, shuffle=False)).astype(np.int64)


def poisson_blocks(generator: np.random.Generator, size: int, sample_rate: float) -> Iterator[np.ndarray]:
    """Draw one Poisson sample out of `size` units in blocks of ascending indices.

    No block is empty, and each is above the blocks before it. The draw is made segment by segment.
    Units of two segments enter independently too, so the law is the law of `poisson_draw`, in
    memory that grows neither with the set nor with the draw.
    """
    block: list[np.ndarray] = []
    for start in range(0, size, SEGMENT):
        block.append(start + poisson_draw(generator, min(SEGMENT, size - start), sample_rate))
        if sum(map(len, block)) >= SEGMENT:
            yield np.concatenate(block)
            block = []
    if sum(map(len, block)):
        yield np.concatenate(block)


def dealt(generator: np.random.Generator, chosen: np.ndarray, processes: int) -> np.ndarray:
    """Assign each row of a draw to a process, uniformly and independently of all other rows.

    Returns (n,) int64.

    Guarantee: one row more or less moves no other row to another process, where it might be
    computed in another way.
    """
    return generator.integers(processes, size=len(chosen))


def group_weights(sizes: np.ndarray, cap: int) -> np.ndarray:
    """Return the weight of one image of a group of each size, (n,) float64.

    With cap = 1, a group counts as the mean of its images; with m, a group of n < m images counts
    n/m of it.

    Guarantee: the weights of a group's images add up to at most 1, rounding included.
    """
    return np.where(sizes > 1, (1 - FLOAT64_SLACK) / np.maximum(sizes, cap), 1 / cap)


def group_picks(generator: np.random.Generator, sizes: np.ndarray, draws: int) -> np.ndarray:
    """Pick `draws` images of each group, uniform and independent.

    Returns their places in the group, (n, draws) int64.
    """
    return generator.integers(0, sizes[:, None], size=(len(sizes), draws))
