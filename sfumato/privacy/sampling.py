"""Poisson sampling.

Every unit (an image or a group) enters a draw independently, with the same probability.
"""

from collections.abc import Iterator

import numpy as np

from sfumato.privacy.rows import FLOAT64_SLACK

SEGMENT = 2**16  # Number of units sampled at a time


def poisson_draw(generator: np.random.Generator, size: int, sample_rate: float) -> np.ndarray:
    """Draw one Poisson sample from `size` units.

    Draws a binomial number of units, then a uniform subset of that size. This has the same
    distribution as one coin toss per unit, but memory use grows with the size of the draw, not of
    the set. A rate of 1 takes every unit.

    Returns ascending indices, (n,) int64; n can be 0.
    """
    if sample_rate >= 1 or not size:
        return np.arange(size, dtype=np.int64)
    count = generator.binomial(size, sample_rate)
    return np.sort(generator.choice(size, size=count, replace=False, shuffle=False)).astype(
        np.int64
    )


def poisson_blocks(
    generator: np.random.Generator, size: int, sample_rate: float
) -> Iterator[np.ndarray]:
    """Draw one Poisson sample from `size` units, in non-empty blocks of ascending indices.

    The sample is drawn segment by segment. Units of different segments enter independently, so the
    distribution equals `poisson_draw`'s, but memory grows neither with the set nor with the draw.
    """
    block: list[np.ndarray] = []
    for start in range(0, size, SEGMENT):
        block.append(start + poisson_draw(generator, min(SEGMENT, size - start), sample_rate))
        if sum(map(len, block)) >= SEGMENT:
            yield np.concatenate(block)
            block = []
    if sum(map(len, block)):
        yield np.concatenate(block)


def assign_processes(
    generator: np.random.Generator, chosen: np.ndarray, processes: int
) -> np.ndarray:
    """Assign each entry of a draw to a process, uniformly and independently of all other entries.

    Returns (n,) int64.

    Guarantee: adding or removing one entry does not change how the other entries are distributed
    over the processes. This matters because two processes might compute a row slightly differently.
    """
    return generator.integers(processes, size=len(chosen))


def group_weights(sizes: np.ndarray, cap: int) -> np.ndarray:
    """Return the weight of each image in groups of these sizes, (n,) float64.

    With cap 1, a group contributes the mean of its images. With cap m, a group of n < m images
    contributes n/m of that mean.

    Guarantee: the weights of a group's images add up to at most 1, rounding included.
    """
    return np.where(sizes > 1, (1 - FLOAT64_SLACK) / np.maximum(sizes, cap), 1 / cap)


def group_picks(generator: np.random.Generator, sizes: np.ndarray, draws: int) -> np.ndarray:
    """Pick `draws` images of each group, uniformly and independently.

    Returns their positions in the group, (n, draws) int64.
    """
    return generator.integers(0, sizes[:, None], size=(len(sizes), draws))
