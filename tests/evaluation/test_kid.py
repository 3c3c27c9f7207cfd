import numpy as np
import pytest

from sfumato.evaluation.metrics.distances import kernel_distance, squared_mmd

RNG = np.random.default_rng(0)


def by_loops(a, b):
    """The unbiased estimate, written as the three sums of its definition."""

    def kernel(x, y):
        return (sum(p * q for p, q in zip(x, y, strict=True)) / len(x) + 1) ** 3

    n, m = len(a), len(b)
    within_a = sum(kernel(a[i], a[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    within_b = sum(kernel(b[i], b[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    return within_a + within_b - 2 * sum(kernel(x, y) for x in a for y in b) / (n * m)


def test_it_agrees_with_the_definition():
    a, b = RNG.normal(size=(7, 3)), RNG.normal(1, 2, size=(9, 3))
    assert squared_mmd(a, b) == pytest.approx(by_loops(a, b), rel=1e-12)


def test_one_subset_of_everything_is_the_plain_estimate():
    a, b = RNG.normal(size=(12, 4)), RNG.normal(size=(12, 4))
    assert kernel_distance(a, b, subsets=3) == (pytest.approx(squared_mmd(a, b)), pytest.approx(0, abs=1e-12))


def test_it_is_unbiased_for_equal_distributions_at_any_size():
    """Mean of 400 independent estimates, within 4 standard errors of 0.

    One false alarm in 16 000 runs (the seed is fixed).
    """
    rng = np.random.default_rng(1)
    for size in (4, 20):
        found = [squared_mmd(rng.normal(size=(size, 5)), rng.normal(size=(size, 5))) for _ in range(400)]
        assert abs(np.mean(found)) < 4 * np.std(found) / 20 and min(found) < 0


def test_it_grows_with_a_shift_and_takes_float32_as_float64():
    a, b = RNG.normal(size=(300, 8)).astype(np.float32), RNG.normal(size=(400, 8)).astype(np.float32)
    distances = [kernel_distance(a, b + shift, subsets=5)[0] for shift in (0, 0.3, 0.6)]
    assert abs(distances[0]) < 0.1 < distances[1] < distances[2]
    huge = (a + 1000).astype(np.float32)
    assert kernel_distance(huge, huge.copy(), subsets=2, size=300)[0] == pytest.approx(
        squared_mmd(huge.astype(float), huge.astype(float))
    )


def test_a_single_image_is_refused():
    with pytest.raises(ValueError, match="two rows or more"):
        kernel_distance(np.zeros((1, 3)), np.zeros((5, 3)))
