"""Maximum mean discrepancy between two sets of features under a cubic kernel. On Inception features this is KID."""

from __future__ import annotations

import numpy as np

DEGREE = 3


def kernel_distance(
    features_a: np.ndarray, features_b: np.ndarray, subsets: int = 100, size: int = 1000
) -> tuple[float, float]:
    """Mean and standard deviation, over random subsets, of the unbiased estimate of MMD².

    features: (N, D), finite, two rows or more each. A subset has `size` rows of each set, drawn without repetition;
    fewer where the smaller set has fewer. Unlike the Fréchet distance it is unbiased at any number of images, so it can
    be negative. Computed in float64.
    Source: Bińkowski et al. 2018 (KID: 100 subsets of 1000).
    """
    if min(len(features_a), len(features_b)) < 2:
        raise ValueError(f"features are {features_a.shape} and {features_b.shape}: expected two rows or more each")
    random = np.random.default_rng(0)
    size = min(size, len(features_a), len(features_b))
    found = []
    for _ in range(subsets):
        a, b = (features[random.choice(len(features), size, replace=False)] for features in (features_a, features_b))
        found.append(squared_mmd(a.astype(np.float64), b.astype(np.float64)))
    return float(np.mean(found)), float(np.std(found))


def squared_mmd(a: np.ndarray, b: np.ndarray) -> float:
    """Unbiased MMD² of (n, D) and (m, D) float64 under k(x, y) = (x·y / D + 1)³: inner sums without their diagonals."""
    n, m = len(a), len(b)
    within_a, within_b, across = (kernel(x, y) for x, y in ((a, a), (b, b), (a, b)))
    mean_a = (within_a.sum() - np.trace(within_a)) / (n * (n - 1))
    mean_b = (within_b.sum() - np.trace(within_b)) / (m * (m - 1))
    return float(mean_a + mean_b - 2 * across.mean())


def kernel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x @ y.T / x.shape[1] + 1) ** DEGREE
