"""Distances between two sets of features, and the Inception Score of one set.

The distances are the Fréchet distance, the sliced distance, and the maximum mean discrepancy (MMD).
On Inception features, the Fréchet distance is called FID, and the MMD is called KID. On other
features, these names are not used, because the values cannot be compared with published ones.
"""

import numpy as np

PROJECTED = 2_000_000  # Maximum number of projected values of each set in memory at a time


def frechet_distance(features_a: np.ndarray, features_b: np.ndarray) -> float:
    """Compute ||μa − μb||² + tr(A) + tr(B) − 2 tr((A^½ B A^½)^½), with sample covariances A, B.

    features_a, features_b: (N, D), finite, each with two rows or more; N may be below D.

    The computation is in float64. With A = XᵀX and B = YᵀY, tr((A^½ B A^½)^½) is the nuclear norm
    of X Yᵀ. X and Y are computed by QR decompositions of the centred rows, so A and B may be
    singular.
    Source: Heusel et al. 2017, Eq. 6 (the distance: Dowson and Landau 1982).
    """
    means = [features.mean(axis=0, dtype=np.float64) for features in (features_a, features_b)]
    x, y = (
        np.asarray(np.linalg.qr((features - mean) / np.sqrt(len(features) - 1), mode="r"))
        for features, mean in zip((features_a, features_b), means, strict=True)
    )
    shift = means[0] - means[1]
    overlap = np.linalg.norm(x @ y.T, "nuc")
    return float(max(0.0, shift @ shift + (x**2).sum() + (y**2).sum() - 2 * overlap))


def sliced_distance(
    features_a: np.ndarray,
    features_b: np.ndarray,
    count: int,
    directions: int = 1000,
    seeds: int = 5,
) -> tuple[float, float]:
    """Compute the sliced Wasserstein distance between two sets.

    Both sets are projected on random directions. The distance is the root mean squared difference
    between the sorted projections of the two sets.

    features_a, features_b: (N, D), finite; count: number of rows to draw from each set, for each
    seed; directions: number of directions to draw, for each seed.

    Returns mean and standard deviation over the seeds, computed in float64. Source: MIND (Berthet
    et al. 2026, arXiv 2605.06797).
    """
    distances = []
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        a, b = (
            features[random.choice(len(features), count, replace=False)]
            for features in (features_a, features_b)
        )
        axes = random.normal(size=(directions, a.shape[1]))
        axes /= np.linalg.norm(axes, axis=1, keepdims=True)
        parts = np.array_split(axes, -(-directions * count // PROJECTED))
        squares = [
            np.square(np.sort(part @ a.T) - np.sort(part @ b.T)).mean(axis=1) for part in parts
        ]
        distances.append(np.sqrt(np.concatenate(squares).mean()))
    return float(np.mean(distances)), float(np.std(distances))


def kernel_distance(
    features_a: np.ndarray, features_b: np.ndarray, subsets: int = 100, size: int = 1000
) -> tuple[float, float]:
    """Estimate MMD² on random subsets; return mean and standard deviation over the subsets.

    Unlike the Fréchet distance, the estimate is unbiased even for few images, and can be negative.
    The computation is in float64.

    features_a, features_b: (N, D), finite, each with two rows or more;
    subsets: number of subsets;
    size: number of rows of each set in a subset. If a set has fewer rows, all subsets are smaller.

    Source: Bińkowski et al. 2018 (KID: 100 subsets of 1000 rows).
    """
    random = np.random.default_rng(0)
    size = min(size, len(features_a), len(features_b))
    estimates = []
    for _ in range(subsets):
        a, b = (
            features[random.choice(len(features), size, replace=False)]
            for features in (features_a, features_b)
        )
        estimates.append(squared_mmd(a.astype(np.float64), b.astype(np.float64)))
    return float(np.mean(estimates)), float(np.std(estimates))


def squared_mmd(a: np.ndarray, b: np.ndarray) -> float:
    """Compute the unbiased MMD² of a, (n, D), and b, (m, D), with k(x, y) = (x·y / D + 1)³.

    Within one set, the pairs of a row with itself are left out. a, b: float64.
    """
    from sklearn.metrics.pairwise import polynomial_kernel

    def mean_within(x: np.ndarray) -> float:
        kernel = polynomial_kernel(x, degree=3)
        return (kernel.sum() - np.trace(kernel)) / (len(x) * (len(x) - 1))

    return float(mean_within(a) + mean_within(b) - 2 * polynomial_kernel(a, b, degree=3).mean())


def inception_score(probabilities: np.ndarray, splits: int = 10) -> tuple[float, float]:
    """Compute exp(mean KL(p(y|x) ‖ p(y))) on each of `splits` parts of a set.

    The score is between 1 and the number of classes. It is higher if each image is clear, and if
    the images together are varied. No real image is used.

    probabilities: (N, classes), with rows that add up to 1. The rows are shuffled first, because
    sets may be sorted by class. If a part would have fewer than two images, there are fewer parts.

    Returns mean and standard deviation over the parts. Source: Salimans et al. 2016.
    """
    from scipy.stats import entropy

    order = np.random.default_rng(0).permutation(len(probabilities))
    scores = []
    for part in np.array_split(order, min(splits, len(order) // 2)):
        p = probabilities[part].astype(np.float64)
        scores.append(np.exp(entropy(p, p.mean(axis=0, keepdims=True), axis=1).mean()))
    return float(np.mean(scores)), float(np.std(scores))
