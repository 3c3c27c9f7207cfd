"""Distances between two sets of features: Fréchet, and maximum mean discrepancy; and the Inception Score of one set.

On Inception features the two distances are FID and KID. On other features they are not called so: published values do
not compare with them.
"""

import numpy as np
from scipy.stats import entropy

ROWS = 4096  # features read at a time
DEGREE = 3  # of the kernel


def frechet_distance(features_a: np.ndarray, features_b: np.ndarray) -> float:
    """||μa − μb||² + tr(A) + tr(B) − 2 tr((A^½ B A^½)^½), with A, B the sample covariances.

    features_a, features_b: (N, D), finite, two rows or more each; N may be below D. Computed in float64, in O(D²) extra
    memory. tr((A^½ B A^½)^½) is the nuclear norm of X Yᵀ, with A = XᵀX and B = YᵀY, so A and B may be singular.
    Source: Heusel et al. 2017, Eq. 6 (the distance: Dowson and Landau 1982).
    """
    a, b = np.asarray(features_a), np.asarray(features_b)
    for features in (a, b):
        fits = features.ndim == 2 and len(features) >= 2 and features.shape[1] == a.shape[1]
        if not fits or not np.isfinite(features).all():
            raise ValueError(f"features are {a.shape} and {b.shape}: expected finite (N, D) and (M, D) with N, M ≥ 2")
    mean_a, mean_b = (features.mean(axis=0, dtype=np.float64) for features in (a, b))
    x, y = covariance_factor(a, mean_a), covariance_factor(b, mean_b)
    shift = mean_a - mean_b
    overlap = np.linalg.norm(x @ y.T, "nuc")
    return float(max(0.0, shift @ shift + (x**2).sum() + (y**2).sum() - 2 * overlap))


def covariance_factor(features: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """R, at most (D, D), with RᵀR the sample covariance: the QR factor of the centred rows, taken block by block."""
    factor = np.empty((0, features.shape[1]))
    for start in range(0, len(features), ROWS):
        rows = (features[start : start + ROWS] - mean) / np.sqrt(len(features) - 1)
        factor = np.asarray(np.linalg.qr(np.concatenate([factor, rows]), mode="r"))
    return factor


def kernel_distance(
    features_a: np.ndarray, features_b: np.ndarray, subsets: int = 100, size: int = 1000
) -> tuple[float, float]:
    """Mean and standard deviation, over random subsets, of the unbiased estimate of MMD².

    features_a, features_b: (N, D), finite, two rows or more each. A subset has `size` rows of each set, fewer if the
    smaller set has fewer. Unlike the Fréchet distance it has no bias at few images, and can be negative. In float64.
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
    within_a, within_b, across = ((x @ y.T / x.shape[1] + 1) ** DEGREE for x, y in ((a, a), (b, b), (a, b)))
    mean_a = (within_a.sum() - np.trace(within_a)) / (n * (n - 1))
    mean_b = (within_b.sum() - np.trace(within_b)) / (m * (m - 1))
    return float(mean_a + mean_b - 2 * across.mean())


def inception_score(probabilities: np.ndarray, splits: int = 10) -> tuple[float, float]:
    """Mean and standard deviation over `splits` parts of exp(mean KL(p(y|x) ‖ p(y))), from 1 to the number of classes.

    Are single images clear, and are all of them together varied? It uses no real image.
    probabilities: (N, classes), rows that add up to 1. They are shuffled first, because sets may be sorted by class.
    There are fewer parts if one would have fewer than two images. Source: Salimans et al. 2016.
    """
    if probabilities.ndim != 2 or len(probabilities) < 2 or not np.allclose(probabilities.sum(axis=1), 1, atol=1e-3):
        raise ValueError(f"probabilities are {probabilities.shape}: expected two rows or more, each adding up to 1")
    order = np.random.default_rng(0).permutation(len(probabilities))
    scores = []
    for part in np.array_split(order, min(splits, len(order) // 2)):
        p = probabilities[part].astype(np.float64)
        scores.append(np.exp(entropy(p, p.mean(axis=0, keepdims=True), axis=1).mean()))
    return float(np.mean(scores)), float(np.std(scores))
