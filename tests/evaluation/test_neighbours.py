import numpy as np
import pytest
from scipy.spatial.distance import cdist

from sfumato.evaluation.metrics.neighbours import (
    MEMORY,
    authenticity,
    nearest_rows,
    precision_recall,
    radii,
)


def distance(x, y):
    return float(np.sqrt(((x - y) ** 2).sum()))


def kth(points, i, k):
    return sorted(distance(points[i], points[j]) for j in range(len(points)) if j != i)[k - 1]


def by_definition(synthetic, real, k):
    """Compute the measures from the complete table of distances."""
    apart = cdist(synthetic, real)
    real_balls, synthetic_balls = (
        np.sort(cdist(own, own), axis=1)[:, k] for own in (real, synthetic)
    )
    inside = apart <= real_balls
    return {
        "precision": inside.any(axis=1).mean(),
        "recall": (apart <= synthetic_balls[:, None]).any(axis=0).mean(),
        "density": inside.sum() / (k * len(synthetic)),
        "coverage": inside.any(axis=0).mean(),
        "neighbours": k,
    }


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize(("drawn", "real"), [(35, 50), (1700, 2600)], ids=["one block", "blocks"])
def test_they_agree_with_the_definitions_in_any_number_of_blocks(k, drawn, real):
    assert (8 * drawn * real > MEMORY * 2**20) == (drawn > 35)
    rng = np.random.default_rng(k)
    synthetic = rng.normal(0.5, 1.2, size=(drawn, 3)).astype(np.float32)
    real = rng.normal(size=(real, 3)).astype(np.float32)
    expected = by_definition(synthetic.astype(float), real.astype(float), k)
    assert 0 < expected["precision"] < 1 and 0 < expected["recall"] < 1
    assert precision_recall(synthetic, real, k) == pytest.approx(expected)


def test_equal_sets_are_perfect_and_far_sets_worthless():
    points = np.random.default_rng(0).normal(size=(60, 4))
    same = precision_recall(points, points.copy())
    assert same["precision"] == same["recall"] == same["coverage"] == 1 and same["density"] > 1
    worthless = {"precision": 0, "recall": 0, "density": 0, "coverage": 0, "neighbours": 5}
    assert precision_recall(points + 100, points) == worthless


def test_equal_images_lie_in_each_others_balls_despite_rounding():
    """A ball around an image with more than k duplicates has radius 0."""
    points = 5 * np.abs(np.random.default_rng(0).normal(size=(200, 128)))
    found = precision_recall(points, np.repeat(points, 7, axis=0))
    assert found["precision"] == found["recall"] == found["coverage"] == 1
    train = np.concatenate([points, points])
    assert authenticity(points, train, points + 1)["authenticity"] == 0
    assert authenticity(points, train, points)["distance_ratio"] == 1


def test_a_set_of_one_kind_is_precise_but_recalls_little():
    rng = np.random.default_rng(0)
    real = np.concatenate([rng.normal(0, 1, (100, 4)), rng.normal(30, 1, (100, 4))])
    found = precision_recall(rng.normal(0, 1, (200, 4)), real)
    assert found["precision"] > 0.8 and found["recall"] < 0.6 and found["coverage"] < 0.6


def test_nearest_finds_index_and_distance():
    rng = np.random.default_rng(2)
    a = rng.normal(size=(25, 3))
    b = rng.normal(size=(11, 3))
    index, found = nearest_rows(a, b)
    table = np.array([[distance(x, y) for y in b] for x in a])
    assert np.array_equal(index, table.argmin(axis=1)) and found == pytest.approx(table.min(axis=1))


def test_duplicates_have_radius_zero_and_few_images_fail():
    points = np.repeat(np.random.default_rng(0).normal(size=(4, 3)), 3, axis=0)
    assert (
        radii(points, 2) == pytest.approx(np.zeros(12), abs=1e-12)
        and (radii(points, 3) > 0.01).all()
    )
    with pytest.raises(ValueError, match="n_neighbors = 12"):
        radii(points, 12)


def test_copies_are_not_authentic_and_fresh_images_are():
    rng = np.random.default_rng(3)
    train = rng.normal(size=(400, 6))
    holdout = rng.normal(size=(300, 6))
    fresh = rng.normal(size=(400, 6))
    nearest_of = [int(((train - x) ** 2).sum(axis=1).argmin()) for x in fresh[:40]]
    farther = [
        distance(x, train[j]) > kth(train, j, 1)
        for x, j in zip(fresh[:40], nearest_of, strict=True)
    ]
    assert authenticity(fresh[:40], train, holdout)["authenticity"] == pytest.approx(
        np.mean(farther)
    )
    real = authenticity(fresh, train, holdout)
    copied = authenticity(train[:200] + 1e-9, train, holdout)
    assert 0.4 < real["authenticity"] < 0.75 and 0.9 < real["distance_ratio"] < 1.1
    assert copied["authenticity"] == 0 and copied["distance_ratio"] < 1e-6
