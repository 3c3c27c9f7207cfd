"""Metrics from nearest neighbours in a feature space.

The metrics are precision, recall, density, coverage and authenticity. scikit-learn is imported only
when a metric is computed, because `stage plan` needs only the names of the metrics.
"""

import numpy as np

MEMORY = 32.0  # Maximum size of the distances in memory at a time, in MiB
NEIGHBOURS = 5  # k for precision, recall, density and coverage; smaller if there are few images


def nearest_rows(features: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the nearest row of `reference` for each row of `features`.

    Returns (index (N,) int64, distance (N,) float64).
    """
    from sklearn.metrics import pairwise_distances_argmin_min

    index, distance = pairwise_distances_argmin_min(
        features.astype(np.float64), reference.astype(np.float64)
    )
    return index, distance


def radii(features: np.ndarray, k: int) -> np.ndarray:
    """Return the distance of each row to its k-th nearest other row, (N,) float64.

    Raises ValueError if there are k rows or fewer.
    """
    from sklearn.neighbors import NearestNeighbors

    distances, _ = (
        NearestNeighbors(n_neighbors=k, algorithm="brute")
        .fit(features.astype(np.float64))
        .kneighbors()
    )
    return np.asarray(distances[:, -1])


def rounding_error(features: np.ndarray) -> float:
    """Return the largest distance that rounding errors can give two equal rows of `features`."""
    return 1e-6 * float(np.linalg.norm(features.astype(np.float64), axis=1).max())


def precision_recall(
    synthetic: np.ndarray, real: np.ndarray, k: int = NEIGHBOURS
) -> dict[str, float]:
    """Compute precision, recall, density and coverage.

    Each image is the centre of a closed ball that reaches to its k-th nearest neighbour in the same
    set. Precision is the share of synthetic images inside at least one ball of a real image. Recall
    is the share of real images inside at least one ball of a synthetic image. For each synthetic
    image, count the balls of real images that contain it. Density is the mean of these counts,
    divided by k, and can exceed 1. Coverage is the share of real images with at least one synthetic
    image in their ball.

    synthetic: (N, D), real: (M, D), finite. Also returns "neighbours", the k that was used. Source:
    Kynkäänniemi et al. 2019, with k = 3; Naeem et al. 2020.
    """
    from sklearn.metrics import pairwise_distances_chunked

    k = min(k, len(synthetic) - 1, len(real) - 1)
    # Without this slack, rounding could place the centre of a ball of radius 0 outside the ball
    slack = rounding_error(real)
    real_radii = radii(real, k) + slack
    synthetic_radii = radii(synthetic, k) + slack
    balls: list[int] = []  # number of balls of real images around each synthetic image
    recalled = np.zeros(len(real), dtype=bool)
    covered = np.zeros(len(real), dtype=bool)
    chunks = pairwise_distances_chunked(
        synthetic.astype(np.float64), real.astype(np.float64), working_memory=MEMORY
    )
    for distances in chunks:
        inside = distances <= real_radii
        own_radii = synthetic_radii[len(balls) : len(balls) + len(distances), None]
        balls += inside.sum(axis=1).tolist()
        covered |= inside.any(axis=0)
        recalled |= (distances <= own_radii).any(axis=0)
    return {
        "precision": float(np.mean(np.array(balls) > 0)),
        "recall": float(recalled.mean()),
        "density": float(np.mean(balls) / k),
        "coverage": float(covered.mean()),
        "neighbours": k,
    }


def authenticity(synthetic: np.ndarray, train: np.ndarray, holdout: np.ndarray) -> dict[str, float]:
    """Measure whether a set is nearer to the training images than new real images are.

    Let t be the training image nearest to a synthetic image. The synthetic image counts as
    authentic if another training image is nearer to t than the synthetic image is (Alaa et al.
    2022). `authenticity` is the share of authentic images. It is near one half for new real images,
    and 0 for copies.

    `distance_ratio` is the median distance of synthetic images to their nearest training image,
    divided by the median distance of hold-out images to their nearest training image. It is near 1
    for new real images, and 0 for copies.
    """
    index, distance = nearest_rows(synthetic, train)
    holdout_median = float(np.median(nearest_rows(holdout, train)[1]))
    slack = rounding_error(train)
    ratio = float(np.median(distance) <= slack)
    if holdout_median > slack:
        ratio = float(np.median(distance)) / holdout_median
    return {
        "authenticity": float((distance > radii(train, 1)[index] + slack).mean()),
        "distance_ratio": ratio,
    }
