"""Metrics from nearest neighbours in a feature space: precision, recall, density, coverage, authenticity."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

CELLS = 4_000_000  # distances held at a time: 32 MB of float64


def squared_distances(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """||aᵢ − bⱼ||² in blocks of rows: yields (rows of a, (rows, M) float64). a: (N, D), b: (M, D)."""
    b = np.asarray(b, dtype=np.float64)
    norms = np.einsum("ij,ij->i", b, b)
    step = max(1, CELLS // len(b))
    for start in range(0, len(a), step):
        rows = slice(start, min(start + step, len(a)))
        block = np.asarray(a[rows], dtype=np.float64)
        distances = block @ b.T
        distances *= -2
        distances += np.einsum("ij,ij->i", block, block)[:, None]
        distances += norms
        yield rows, np.maximum(distances, 0, out=distances)


def nearest(features: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest row of `reference` for each row of `features`: (index (N,) int64, distance (N,) float64)."""
    index, distance = np.empty(len(features), dtype=np.int64), np.empty(len(features))
    for rows, block in squared_distances(features, reference):
        index[rows] = block.argmin(axis=1)
        distance[rows] = np.sqrt(block.min(axis=1))
    return index, distance


def radii(features: np.ndarray, k: int) -> np.ndarray:
    """(N,) squared distance of each row to its k-th nearest other row."""
    if not 0 < k < len(features):
        raise ValueError(
            f"k={k} nearest neighbours cannot be found among {len(features)} images: "
            f"k must be from 1 to {len(features) - 1}"
        )
    found = np.empty(len(features))
    for rows, block in squared_distances(features, features):
        # Each row sorts itself first, whatever the rounding.
        block[np.arange(len(block)), np.arange(rows.start, rows.stop)] = -1.0
        found[rows] = np.partition(block, k, axis=1)[:, k]
    return found


def precision_recall(synthetic: np.ndarray, real: np.ndarray, k: int = 5) -> dict[str, float]:
    """Precision, recall (Kynkäänniemi et al. 2019), density, coverage (Naeem et al. 2020): balls to the k-th neighbour.

    synthetic: (N, D), real: (M, D), finite, more than k rows each. Balls are closed; k is 3 in the first paper.
    Precision: share of synthetic images inside some real ball. Recall: share of real images inside some synthetic ball.
    Density: mean number of real balls around a synthetic image, over k; it can exceed 1. Coverage: share of real balls
    that hold a synthetic image.
    """
    real_radii, synthetic_radii = radii(real, k), radii(synthetic, k)
    precise = dense = 0
    recalled, covered = np.zeros(len(real), dtype=bool), np.zeros(len(real), dtype=bool)
    for rows, block in squared_distances(synthetic, real):
        inside = block <= real_radii
        precise += int(inside.any(axis=1).sum())
        dense += int(inside.sum())
        covered |= inside.any(axis=0)
        recalled |= (block <= synthetic_radii[rows, None]).any(axis=0)
    count = len(synthetic)
    return {
        "precision": precise / count,
        "recall": float(recalled.mean()),
        "density": dense / (k * count),
        "coverage": float(covered.mean()),
    }


def authenticity(synthetic: np.ndarray, train: np.ndarray, holdout: np.ndarray) -> dict[str, float]:
    """Whether a set comes nearer to the training images than fresh real images do.

    `authenticity`: share of synthetic images farther from their nearest training image than that one is from its own
    (Alaa et al. 2022); near one half for fresh real images, 0 for copies. `distance_ratio`: median distance of a
    synthetic image to its nearest training image, over that of a hold-out image; 1 for fresh real images, 0 for copies.
    """
    index, distance = nearest(synthetic, train)
    own = np.sqrt(radii(train, 1))
    fresh = float(np.median(nearest(holdout, train)[1]))
    ratio = float(np.median(distance)) / fresh if fresh > 0 else float(np.median(distance) == 0)
    return {"authenticity": float((distance > own[index]).mean()), "distance_ratio": ratio}
