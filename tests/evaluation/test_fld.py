import math

import numpy as np
import pytest
import torch

from sfumato.evaluation.metrics import fld
from sfumato.evaluation.metrics.fld import (
    feature_likelihood,
    fit_variances,
    negative_log_likelihood,
)

RNG = np.random.default_rng(0)


def features(count, seed):
    """Return points near a curved sheet in 10 dimensions. The sheet is always the same."""
    sheet = np.random.default_rng(9).normal(size=(3, 10))
    rng = np.random.default_rng(seed)
    return np.maximum(rng.normal(size=(count, 3)) @ sheet, -0.5) + 0.1 * rng.normal(
        size=(count, 10)
    )


@pytest.fixture(scope="module")
def real():
    return features(400, 1), features(300, 2), features(400, 3)  # training, hold-out, unseen


def by_loops(points, centres, variances):
    total = 0.0
    for x in points:
        density = 0.0
        for centre, v in zip(centres, variances, strict=True):
            apart = sum((p - q) ** 2 for p, q in zip(x, centre, strict=True))
            density += math.exp(-apart / (2 * v)) / (2 * math.pi * v) ** (len(x) / 2)
        total += math.log(density / len(centres))
    return -total / (len(points) * points.shape[1])


def test_the_likelihood_equals_the_mixtures():
    points = RNG.normal(size=(9, 3))
    centres = RNG.normal(size=(5, 3))
    variances = RNG.uniform(0.3, 2, size=5)
    found = negative_log_likelihood(
        torch.from_numpy(points), torch.from_numpy(centres), torch.from_numpy(variances)
    )
    assert found == pytest.approx(by_loops(points, centres, variances))


def test_a_set_counted_four_times_has_the_same_likelihood():
    centres = torch.from_numpy(features(30, 4))
    points = torch.from_numpy(features(130, 5))
    repeated = points.repeat(4, 1)
    assert len(points) < fld.ROWS_AT_ONCE < len(repeated) and len(repeated) % fld.ROWS_AT_ONCE
    variances = fit_variances(centres, points)
    torch.testing.assert_close(fit_variances(centres, repeated), variances, rtol=1e-6, atol=0)
    whole, parts = (
        negative_log_likelihood(rows, centres, variances) for rows in (points, repeated)
    )
    assert parts == pytest.approx(whole, abs=1e-9)


def test_the_widths_are_as_likely_as_by_gradient_descent():
    """The mean log-likelihood by expectation-maximisation is at most 0.02 below the best that Adam
    finds with two learning rates.
    """
    centres = torch.from_numpy(features(30, 4))
    points = torch.from_numpy(features(60, 5))
    distances = torch.cdist(points, centres) ** 2
    far = 0.81 * ((points - points.mean(0)) ** 2).sum(1, keepdim=True)

    def objective(log_variances, broad):
        parts = [
            -0.5 * d / v.exp() - 5 * (math.log(2 * math.pi) + v) - w
            for d, v, w in ((distances, log_variances, math.log(30)), (far, broad, 0.0))
        ]
        return torch.cat(parts, dim=1).logsumexp(dim=1).mean()

    def at_best_background(log_variances):
        return max(
            float(objective(log_variances, torch.tensor([b]).double()))
            for b in np.linspace(-3, 3, 121)
        )

    start = ((distances.min(dim=0).values + 1e-3) / 10).log()
    best = -math.inf  # best value of Adam
    for rate in (0.05, 0.2):
        log_variances = start.clone().requires_grad_()
        broad = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        adam = torch.optim.Adam([log_variances, broad], lr=rate)
        for _ in range(300):
            adam.zero_grad()
            (-objective(log_variances, broad)).backward()
            adam.step()
        best = max(best, float(objective(log_variances, broad).detach()))
    fitted = at_best_background(fit_variances(centres, points).log())
    assert fitted > at_best_background(start) + 0.1 and fitted > best - 0.02


def test_unseen_real_images_score_near_zero_and_worse_sets_worse(real):
    train, holdout, unseen = real
    fresh = feature_likelihood(unseen, train, holdout)
    assert abs(fresh["fld"]) < 6 and abs(fresh["generalisation_gap"]) < 12  # measured −2, −5
    spoiled = {
        "shifted": unseen + 1.0,
        "noisy": unseen + RNG.normal(0, 0.7, unseen.shape),
        "narrow": unseen[unseen[:, 0] > np.quantile(unseen[:, 0], 0.7)],
    }
    assert all(
        feature_likelihood(rows, train, holdout)["fld"] > fresh["fld"] + 10
        for rows in spoiled.values()
    )


def test_copies_of_training_images_are_found(real):
    train, holdout, unseen = real
    mixed = np.concatenate([unseen[:200], train[:200]])
    copies, half, fresh = (
        feature_likelihood(rows, train, holdout) for rows in (train, mixed, unseen)
    )
    assert copies["fld"] > 1000 and copies["generalisation_gap"] < -1000
    assert half["generalisation_gap"] < fresh["generalisation_gap"] - 30
    assert math.isfinite(copies["fld"])


def test_constant_features_are_left_out_and_units_do_not_matter(real):
    train, holdout, unseen = real
    plain = feature_likelihood(unseen, train, holdout)
    wider = [
        np.concatenate([rows * 1000 + 7, np.full((len(rows), 2), 3.0)], axis=1)
        for rows in (unseen, train, holdout)
    ]
    assert feature_likelihood(*wider) == pytest.approx(plain, rel=1e-6, abs=1e-6)
    assert feature_likelihood(np.zeros((9, 3)), np.zeros((9, 3)), np.zeros((9, 3))) == {}
