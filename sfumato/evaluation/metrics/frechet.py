"""Fréchet distance between two sets of features, each taken as a Gaussian.

On Inception features this is FID. On other features it is not called FID: published FIDs do not compare with it.
"""

from __future__ import annotations

import numpy as np

ROWS = 4096  # features read at a time


def frechet_distance(features_a: np.ndarray, features_b: np.ndarray) -> float:
    """||μa − μb||² + tr(A) + tr(B) − 2 tr((A^½ B A^½)^½), with A, B the sample covariances.

    features: (N, D), finite, two rows or more each; N may be below D. Computed in float64, in O(D²) extra memory.
    tr((A^½ B A^½)^½) is the nuclear norm of X Yᵀ, where A = XᵀX and B = YᵀY. No matrix root is taken, so A and B may be
    singular.
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
