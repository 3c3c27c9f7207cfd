import math

import numpy as np
import pytest

from sfumato.evaluation.metrics.distances import inception_score


def by_loops(p):
    """exp of the mean divergence of each row from the mean row."""
    mean = [sum(row[j] for row in p) / len(p) for j in range(len(p[0]))]
    return math.exp(
        sum(sum(x * math.log(x / m) for x, m in zip(row, mean, strict=True) if x > 0) for row in p) / len(p)
    )


def test_it_agrees_with_the_definition():
    p = np.random.default_rng(0).dirichlet(np.ones(6), size=40)
    assert inception_score(p, splits=1) == (pytest.approx(by_loops(p.tolist())), 0)


def test_sure_and_even_predictions_reach_the_number_of_classes_and_flat_ones_one():
    sorted_by_class = np.repeat(np.eye(5), 200, axis=0)
    mean, std = inception_score(sorted_by_class)
    assert 4.8 < mean <= 5 and std < 0.1  # sorted sets are shuffled before they are split
    assert inception_score(np.full((50, 5), 0.2)) == (pytest.approx(1), pytest.approx(0))


@pytest.mark.parametrize("bad", [np.full((1, 4), 0.25), np.ones((5, 4)), np.ones(4) / 4])
def test_what_is_no_probability_is_refused(bad):
    with pytest.raises(ValueError, match="adding up to 1"):
        inception_score(bad)
