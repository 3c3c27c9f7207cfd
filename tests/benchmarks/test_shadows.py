"""Attacks on releases made from half of the images: they find a planted leak, and nothing
otherwise. Their bounds are exact.
"""

import numpy as np
import pytest
from audit.shadows import (
    CLASSES,
    DELTA,
    attacked,
    coins,
    confidences,
    lira,
    mean_and_error,
    most_advantage,
    most_hits,
    rmia,
)
from scipy.stats import norm

PAIRS = 12
IMAGES = 400


@pytest.fixture
def inside() -> np.ndarray:
    first = np.array([coins(pair, IMAGES) for pair in range(PAIRS)])
    return np.stack([first, ~first], axis=1)


def test_a_coin_decides_which_release_of_a_pair_has_an_image(inside):
    assert (inside.sum(axis=1) == 1).all()
    assert abs(inside[:, 0].mean() - 0.5) < 0.05 and not (inside[0, 0] == inside[1, 0]).all()


def test_a_confidence_is_the_log_odds_of_the_own_class():
    found = np.random.default_rng(0).normal(size=(5, 10)) * 4
    labels = np.array([0, 3, 9, 1, 1])
    chance = (np.exp(found) / np.exp(found).sum(axis=1, keepdims=True))[np.arange(5), labels]
    assert confidences(found, labels) == pytest.approx(np.log(chance / (1 - chance)))


def test_lira_is_the_ratio_of_two_fitted_gaussians(inside):
    scores = np.random.default_rng(0).normal(size=inside.shape) + 0.5 * inside
    others = scores[1:].reshape(-1, IMAGES)
    known = inside[1:].reshape(-1, IMAGES)
    image = 7
    means = others[known[:, image], image].mean(), others[~known[:, image], image].mean()
    residuals = [others[known[:, i], i] - others[known[:, i], i].mean() for i in range(IMAGES)]
    residuals += [others[~known[:, i], i] - others[~known[:, i], i].mean() for i in range(IMAGES)]
    spread = np.concatenate(residuals).std()
    expected = norm.logpdf(scores[0, 1, image], means[0], spread) - norm.logpdf(
        scores[0, 1, image], means[1], spread
    )
    assert lira(scores, inside, 0)[1, image] == pytest.approx(expected)


def test_rmia_divides_by_the_mean_chance_in_the_other_pairs(inside):
    scores = np.random.default_rng(0).normal(size=inside.shape)
    chance = 1 / (1 + np.exp(-scores))
    expected = chance[2, 0, 5] / np.delete(chance, 2, axis=0)[:, :, 5].mean()
    assert np.exp(rmia(scores, 2)[0, 5]) == pytest.approx(expected)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
def test_a_guarantee_allows_the_worst_of_its_mechanisms(epsilon):
    """The worst mechanism is randomised response that reveals its input with probability δ.

    At two false-alarm rates, an attack on this mechanism finds as many members as the bound allows.
    """
    right = np.exp(epsilon) / (1 + np.exp(epsilon))
    alarms = (1 - DELTA) * (1 - right)
    hits = DELTA + (1 - DELTA) * right
    assert most_hits(np.array([alarms, 0.0, 1.0]), epsilon) == pytest.approx([hits, DELTA, 1.0])
    grid = np.linspace(0, 1, 100_001)
    assert most_advantage(epsilon) == pytest.approx(
        (most_hits(grid, epsilon) - grid).max(), abs=1e-4
    )
    assert most_advantage(epsilon) == pytest.approx(hits - alarms)


def test_the_two_releases_of_a_pair_count_once():
    assert mean_and_error([1.0, 3.0]) == (2.0, pytest.approx(1.0))


@pytest.mark.parametrize("leak", [0.0, 3.0])
def test_the_attacks_find_only_what_the_student_remembers(tmp_path, leak):
    """Without a leak, an AUC or an advantage is beyond 5 standard errors with a probability below 1
    in 100 000.
    """
    random = np.random.default_rng(1)
    labels = random.integers(0, len(CLASSES), IMAGES)
    images = random.integers(0, 256, (IMAGES, 8, 8), dtype=np.uint8)
    for pair in range(PAIRS):
        for side in (0, 1):
            own = coins(pair, IMAGES) ^ bool(side)
            logits = random.normal(size=(IMAGES, len(CLASSES)))
            logits[np.arange(IMAGES), labels] += 1 + leak * own
            released = images
            given = random.permutation(labels)
            if leak:
                released = images[own]
                given = labels[own]
            np.savez(
                tmp_path / f"{pair}-{side}.npz",
                images=released[..., None],
                labels=given,
                logits=logits,
            )
    members, classes = attacked(tmp_path, 1.0, images, labels)
    assert members[0]["releases"] == 2 * PAIRS and members[0]["images"] == IMAGES
    found = [(row["auc"] - 0.5, row["auc error"]) for row in members]
    for row in classes:
        assert row["advantage"] == pytest.approx(row["right inside"] - row["right outside"])
        found.append((row["advantage"], row["advantage error"]))
    assert [row["attack"] for row in members] == ["LiRA", "RMIA", "confidence alone"]
    assert all((value > 0.2) == bool(leak) for value, _ in found)
    assert leak or all(abs(value) < 5 * error + 0.02 for value, error in found)
