"""The distances and the Inception Score equal their definitions.

The Fréchet distance equals pytorch-fid's.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.linalg

from sfumato.evaluation.metrics.distances import (
    PROJECTED,
    frechet_distance,
    inception_score,
    kernel_distance,
    sliced_distance,
    squared_mmd,
)

RNG = np.random.default_rng(0)


def skewed(rows, columns, rank, seed):
    """Return correlated features of a given rank. Their mean is not zero."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, columns)) + rng.normal(
        size=columns
    )


@pytest.fixture
def pytorch_fid(monkeypatch):
    """Return pytorch-fid's own distance.

    pytorch-fid passes `disp` to SciPy's `sqrtm`. Newer versions of SciPy do not accept this
    argument, so a wrapper accepts it.
    """
    from pytorch_fid import fid_score

    def sqrtm(matrix, disp=True):
        root = scipy.linalg.sqrtm(matrix)
        return root if disp else (root, np.nan)

    def distance(a, b):
        moments = (part for x in (a, b) for part in (x.mean(axis=0), np.cov(x, rowvar=False)))
        return fid_score.calculate_frechet_distance(*moments)

    monkeypatch.setattr(fid_score, "linalg", SimpleNamespace(sqrtm=sqrtm))
    return distance


@pytest.mark.parametrize("rank", [16, 6, 1])
@pytest.mark.parametrize("rows", [400, 17, 9])
@pytest.mark.filterwarnings("ignore:.*singular")
def test_the_frechet_distance_equals_pytorch_fids(pytorch_fid, rank, rows):
    a = skewed(rows, 16, rank, 3)
    b = skewed(300, 16, 16, 4)
    assert frechet_distance(a, b) == pytest.approx(pytorch_fid(a, b), rel=1e-3)
    assert frechet_distance(a.astype(np.float32), b.astype(np.float32)) == pytest.approx(
        pytorch_fid(a, b), rel=1e-3
    )
    a[:, :5], b[:, 3:8] = 0, 2  # constant features
    assert frechet_distance(a, b) == pytest.approx(pytorch_fid(a, b), rel=1e-3)


def test_the_frechet_distance_is_symmetric_and_finds_a_shift():
    a = skewed(100, 8, 8, 5)
    b = skewed(80, 8, 8, 6)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a))
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(a, a + 3) == pytest.approx(9 * 8)
    spread = np.trace(np.cov(a, rowvar=False))  # (2 − 1)² tr A
    assert frechet_distance(a, (a - a.mean(0)) * 2 + a.mean(0)) == pytest.approx(spread)
    assert frechet_distance(np.zeros((5, 3)), np.ones((4, 3))) == pytest.approx(3)


def mmd_by_loops(a, b):
    """Compute the unbiased estimate by the three sums of its definition."""

    def kernel(x, y):
        return (sum(p * q for p, q in zip(x, y, strict=True)) / len(x) + 1) ** 3

    n = len(a)
    m = len(b)
    within_a = sum(kernel(a[i], a[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    within_b = sum(kernel(b[i], b[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    return within_a + within_b - 2 * sum(kernel(x, y) for x in a for y in b) / (n * m)


def test_the_kernel_distance_follows_its_definition():
    a = RNG.normal(size=(7, 3))
    b = RNG.normal(1, 2, size=(9, 3))
    assert squared_mmd(a, b) == pytest.approx(mmd_by_loops(a, b), rel=1e-12)
    # If each subset contains all rows, the result is the plain estimate
    a = RNG.normal(size=(12, 4))
    b = RNG.normal(size=(12, 4))
    assert kernel_distance(a, b, subsets=3) == (
        pytest.approx(squared_mmd(a, b)),
        pytest.approx(0, abs=1e-12),
    )


def test_the_kernel_distance_is_unbiased_at_any_size():
    """The mean of 400 independent estimates is within 4 standard errors of 0.

    The seed is fixed. With another seed, each size gives a false alarm in one of 16 000 runs.
    """
    rng = np.random.default_rng(1)
    for size in (4, 20):
        found = [
            squared_mmd(rng.normal(size=(size, 5)), rng.normal(size=(size, 5))) for _ in range(400)
        ]
        assert abs(np.mean(found)) < 4 * np.std(found) / 20 and min(found) < 0


def test_the_kernel_distance_grows_with_a_shift():
    a = RNG.normal(size=(300, 8)).astype(np.float32)
    b = RNG.normal(size=(400, 8)).astype(np.float32)
    distances = [kernel_distance(a, b + shift, subsets=5)[0] for shift in (0, 0.3, 0.6)]
    assert abs(distances[0]) < 0.1 < distances[1] < distances[2]
    huge = (a + 1000).astype(np.float32)
    found, _ = kernel_distance(huge, huge.copy(), subsets=2, size=300)
    assert found == pytest.approx(squared_mmd(huge.astype(float), huge.astype(float)))


def score_by_loops(p):
    """Return exp of the mean Kullback–Leibler divergence of the rows from their mean."""
    mean = [sum(row[j] for row in p) / len(p) for j in range(len(p[0]))]
    apart = (sum(x * math.log(x / m) for x, m in zip(row, mean, strict=True) if x > 0) for row in p)
    return math.exp(sum(apart) / len(p))


def test_the_inception_score_follows_its_definition():
    p = np.random.default_rng(0).dirichlet(np.ones(6), size=40)
    assert inception_score(p, splits=1) == (pytest.approx(score_by_loops(p.tolist())), 0)
    sorted_by_class = np.repeat(np.eye(5), 200, axis=0)
    mean, std = inception_score(sorted_by_class)
    assert 4.8 < mean <= 5 and std < 0.1  # sorted sets are shuffled before they are split
    assert inception_score(np.full((50, 5), 0.2)) == (pytest.approx(1), pytest.approx(0))


def sliced_by_loops(a, b, axes):
    pairs = ((sorted((a @ axis).tolist()), sorted((b @ axis).tolist())) for axis in axes)
    means = [sum((p - q) ** 2 for p, q in zip(*pair, strict=True)) / len(a) for pair in pairs]
    return math.sqrt(sum(means) / len(axes))


@pytest.mark.parametrize(("rows", "number"), [(9, 6), (1001, 2000)], ids=["one block", "blocks"])
def test_the_sliced_distance_follows_its_definition_in_blocks(rows, number):
    assert (rows * number > PROJECTED) == (number > 6)
    a = RNG.normal(size=(rows, 3))
    b = RNG.normal(1, 2, size=(rows, 3))
    axes = np.random.default_rng(0)
    # `sliced_distance` first draws rows of each set: here, all rows in a random order
    axes.choice(rows, rows, replace=False), axes.choice(rows, rows, replace=False)
    directions = axes.normal(size=(number, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    found = sliced_distance(a, b, rows, directions=number, seeds=1)
    assert found == (pytest.approx(sliced_by_loops(a, b, directions)), 0)


def test_the_sliced_distance_is_symmetric_and_finds_a_shift():
    a = skewed(120, 8, 8, 5)
    b = skewed(120, 8, 8, 6)
    assert sliced_distance(a, b, 120, 50)[0] == pytest.approx(sliced_distance(b, a, 120, 50)[0])
    assert sliced_distance(a, a, 120) == (pytest.approx(0, abs=1e-12), pytest.approx(0, abs=1e-12))
    # A shift by 3 on 8 axes has a mean square of 9 · 8 / 8 along a random direction
    assert sliced_distance(a, a + 3, 120)[0] == pytest.approx(3, rel=0.1)
    assert sliced_distance(a, b, 30)[1] > 0, "each seed draws its own rows and directions"


def test_equal_moments_do_not_make_the_sliced_distance_small():
    """Compare the four points (±1, ±1) with a Gaussian. Both sets have mean 0 and variance 1, so
    their Fréchet distance is nearly 0.
    """
    rng = np.random.default_rng(0)
    real = rng.normal(size=(4000, 2))
    more = rng.normal(size=(4000, 2))
    fitted = rng.choice([-1.0, 1.0], size=(4000, 2))
    assert frechet_distance(fitted, real) < 0.01
    assert (
        sliced_distance(fitted, real, 4000, 200, 2)[0]
        > 8 * sliced_distance(more, real, 4000, 200, 2)[0]
    )
