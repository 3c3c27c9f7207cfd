"""Feature Likelihood Divergence: fidelity, diversity and novelty in one number.

A Gaussian is centred on every synthetic feature vector. The widths of these Gaussians are fitted so
that *training* features are likely, and the score is the likelihood of *hold-out* features. The
Gaussian on a copy of a training image becomes so narrow that no hold-out feature is likely under
it.

Source: Jiralerspong et al. 2023.
"""

import math

import numpy as np
import torch
from torch import Tensor

ROUNDS = 40  # Maximum number of rounds of expectation-maximisation
# The fit stops after a round in which the mean log-likelihood per dimension rises by less than this
SETTLED = 1e-5
MIN_VARIANCE = 1e-4  # Minimum variance of a Gaussian, for features of variance 1
ROWS_AT_ONCE = 256


def feature_likelihood(
    synthetic: np.ndarray, train: np.ndarray, holdout: np.ndarray
) -> dict[str, float]:
    """Compute `fld` and `generalisation_gap`, in hundredths of a nat per dimension.

    `fld` is the negative log-likelihood of the hold-out under the Gaussians on the synthetic set,
    minus the negative log-likelihood of the hold-out under a baseline. The baseline consists of
    Gaussians on one half of the training features. Their widths are fitted to the other half. A set
    with `fld` 0 is as good as real images. Copies of training images give values in the thousands.

    `generalisation_gap` is the negative log-likelihood of the training set, minus the negative
    log-likelihood of the hold-out, both under the Gaussians on the synthetic set. It is far below 0
    if images were memorised. Widths are fitted by expectation-maximisation, not by 50 steps of Adam
    as in the paper.

    synthetic, train, holdout: (N, D), finite, each with 4 rows or more. Each feature is shifted and
    scaled so that it has mean 0 and variance 1 on the hold-out. If a feature is constant on the
    hold-out, it is left out.
    """
    random = np.random.default_rng(0)
    max_rows = 4000  # maximum number of rows, which bounds time and memory (0.3 GB)
    # The baseline gets as many centres as the synthetic set, because more centres give a better
    # score
    size = min(len(train) // 2, len(synthetic), max_rows)
    centres, train_rows, holdout_rows = (
        np.asarray(features[random.permutation(len(features))[:number]], dtype=np.float64)
        for features, number in ((synthetic, size), (train, 2 * size), (holdout, max_rows))
    )
    mean = holdout_rows.mean(axis=0)
    std = holdout_rows.std(axis=0, ddof=1)
    varied = std > 1e-8 * max(float(std.max()), 1e-300)
    if not varied.any():  # likelihoods of constant features cannot be compared
        return {}
    normal, points, unseen = (
        torch.from_numpy((features[:, varied] - mean[varied]) / std[varied])
        for features in (centres, train_rows, holdout_rows)
    )
    variances = fit_variances(normal, points)
    of_holdout = negative_log_likelihood(unseen, normal, variances)
    of_train = negative_log_likelihood(points, normal, variances)
    baseline = negative_log_likelihood(
        unseen, points[:size], fit_variances(points[:size], points[size:])
    )
    return {
        "fld": 100 * (of_holdout - baseline),
        "generalisation_gap": 100 * (of_train - of_holdout),
    }


def fit_variances(centres: Tensor, points: Tensor) -> Tensor:
    """Fit the variances of Gaussians with fixed centres and equal weights to points.

    centres: (M, D); points: (N, D). Returns (M,), the variance of the Gaussian on each centre.

    During the fit, an additional broad Gaussian at the mean of the points explains the points that
    are far from all centres. Otherwise such points would widen the Gaussian on the nearest centre.
    As in the authors' method, the broad Gaussian is dropped afterwards.
    """
    dimension = points.shape[1]
    distances = torch.cdist(points, centres).square_()  # (N, M)
    # (N, 1): squared distances to the mean, after each point is moved a tenth of the way towards it
    background_distances = 0.9**2 * torch.cdist(points, points.mean(dim=0, keepdim=True)).square_()
    variances = ((distances.min(dim=0).values + 1e-3) / dimension).clamp_min(MIN_VARIANCE)
    background = torch.ones(1, dtype=torch.float64)
    previous_total = -math.inf
    for _ in range(ROUNDS):
        weight = torch.zeros_like(variances)
        spread = torch.zeros_like(variances)
        broad_weight = 0.0
        broad_spread = 0.0
        total = 0.0
        for squared, from_mean in zip(
            distances.split(ROWS_AT_ONCE), background_distances.split(ROWS_AT_ONCE), strict=True
        ):
            log_density = log_gaussian(squared, variances, dimension).sub_(math.log(len(centres)))
            log_broad = log_gaussian(from_mean, background, dimension)  # (B, 1)
            log_total = torch.logaddexp(log_density.logsumexp(dim=1, keepdim=True), log_broad)
            share = log_density.sub_(log_total).exp_()
            weight += share.sum(dim=0)
            spread += share.mul_(squared).sum(dim=0)
            broad = (log_broad - log_total).exp_()
            broad_weight += float(broad.sum())
            broad_spread += float((broad * from_mean).sum())
            total += float(log_total.sum())
        used = weight > 1e-12  # a Gaussian that explains no point keeps its variance
        variances = torch.where(
            used, spread / (dimension * weight.clamp_min(1e-12)), variances
        ).clamp_min(MIN_VARIANCE)
        if broad_weight > 1e-12:
            background = torch.full_like(
                background, max(broad_spread / (dimension * broad_weight), MIN_VARIANCE)
            )
        if total - previous_total < SETTLED * dimension * len(points):
            break
        previous_total = total
    return variances


def negative_log_likelihood(points: Tensor, centres: Tensor, variances: Tensor) -> float:
    """Compute the mean negative log-likelihood of the points, in nats per dimension."""
    dimension = points.shape[1]
    total = 0.0
    for part in points.split(ROWS_AT_ONCE):
        log_density = log_gaussian(torch.cdist(part, centres).square_(), variances, dimension)
        total += float(log_density.logsumexp(dim=1).sum()) - math.log(len(centres)) * len(
            log_density
        )
    return -total / (len(points) * dimension)


def log_gaussian(distances: Tensor, variances: Tensor, dimension: int) -> Tensor:
    """Compute the log densities of N points under M isotropic Gaussians, (N, M).

    distances: (N, M), squared distances of the points to the centres; variances: (M,).
    """
    return (distances * (-0.5 / variances)).sub_(0.5 * dimension * (2 * math.pi * variances).log())
