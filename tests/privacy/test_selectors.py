"""For neighbouring sets, the selectors of DP-SAPF cost more than its paper states or counts.

The numbers here support the statements in docs/papers.md.
"""

import itertools
import math

import pytest
from scipy.stats import norm

from sfumato.privacy.accountant import NoiseRequest, calibrate, epsilon
from sfumato.privacy.events import Mechanism

CELEBA = 162_770
DELTA = 1 / (CELEBA * math.log(CELEBA))
# Table 10 of the paper, shares of the selection at σ = 5
PRINTED = {1.0: 0.1292, 5.0: 0.0057, 10.0: 0.0017}


def cost(noise_multiplier: float) -> float:
    return epsilon([Mechanism(noise_multiplier=noise_multiplier).event], DELTA)


def excess(noise_multiplier: float, claimed: float) -> float:
    """Return the δ that a claim of ε needs: the largest P(A | D′) − e^ε·P(A | D).

    D′ has one more image. Its clipped gradient lies in one entry. In units of the clip, this
    entry is N(1, σ²) instead of N(0, σ²). A is the event that the entry exceeds the best threshold,
    at which the likelihood ratio is e^ε.
    """
    threshold = 0.5 + claimed * noise_multiplier**2
    with_it = norm.sf(threshold, 1, noise_multiplier)
    without = norm.sf(threshold, 0, noise_multiplier)
    return float(with_it - math.exp(claimed) * without)


@pytest.mark.parametrize("budget", PRINTED)
def test_gaussian_selection_at_sigma_5_exceeds_its_share(budget):
    """The paper charges the selection at σ = 5 a share s of the Rényi cost of ε.

    A Gaussian mechanism with noise σ(ε)/√s has this cost. The selection distinguishes neighbouring
    sets better than such a mechanism can.
    """
    whole = calibrate({"all": NoiseRequest()}, budget, DELTA)["all"].noise_multiplier
    claimed = cost(whole / math.sqrt(PRINTED[budget]))
    assert excess(5.0, claimed) > 100 * DELTA
    assert excess(5.0, cost(5.0)) <= DELTA  # the true cost at σ = 5 is a bound


def peeled(scores: list[float], picks: list[int], beta: float) -> float:
    """Return ln of the probability that the exponential mechanism picks `picks` in this order.

    The probability of a pick is proportional to exp(β·score/2).
    """
    left = dict(enumerate(scores))
    total = 0.0
    for pick in picks:
        total += beta * left[pick] / 2 - math.log(
            sum(math.exp(beta * score / 2) for score in left.values())
        )
        del left[pick]
    return total


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_exponential_picks_cost_more_than_one_of_them(beta):
    """The mechanism picks 14 of 48 matrices. Scores are in units of the clip.

    The gradient of one image is spread over these 14 matrices, and changes each of their scores by
    1/√14. The privacy loss of the picks exceeds β, the cost of one pick. The loss of c picks is at
    most c·β, and is near √c·β/2 here.
    """
    matrices = 48
    picks = list(range(14))
    whole = [1 / math.sqrt(14) if k in picks else 0.0 for k in range(matrices)]
    assert sum(score**2 for score in whole) == pytest.approx(1)  # one image's clipped gradient
    loss = peeled(whole, picks, beta) - peeled([0.0] * matrices, picks, beta)
    assert beta < loss <= 14 * beta


def test_one_image_in_one_matrix_moves_its_score_by_the_clip():
    """The sensitivity of a score is therefore the clip, not the clip over √(number of matrices)."""
    loss = peeled([1.0, *[0.0] * 47], [0], 1.0) - peeled([0.0] * 48, [0], 1.0)
    assert loss > 0.4 > 0.5 / math.sqrt(48)


def released(gap: int, name: str, beta: float, delta: float) -> dict[str, float]:
    """Return the probability of each outcome of propose-test-release.

    The best set is released if gap + Laplace(1/β) > ln(1/δ′)/β. Otherwise, nothing is released.

    gap: number of images that can be added without changing the best set.
    """
    passes = (
        0.5 * math.exp(-(math.log(1 / delta) - gap * beta))
        if gap * beta <= math.log(1 / delta)
        else 1.0
    )
    return {name: passes, "nothing": 1 - passes}


@pytest.mark.parametrize("delta", [1e-3, DELTA])
def test_propose_test_release_adds_its_own_delta(delta):
    """Two neighbouring data sets have different best sets, A and B.

    The first data set may release A, but the second never does.
    """
    one = released(0, "A", 0.1, delta)
    other = released(0, "B", 0.1, delta)
    # So the Rényi divergence of every order above 1 is infinite
    assert one["A"] > 0 and other.get("A", 0.0) == 0.0
    for claimed in (0.1, 1.0, 10.0):
        best = max(
            sum(one.get(out, 0.0) - math.exp(claimed) * other.get(out, 0.0) for out in event)
            for size in (1, 2)
            for event in itertools.combinations(("A", "B", "nothing"), size)
        )
        assert best == pytest.approx(delta / 2)  # for any ε
