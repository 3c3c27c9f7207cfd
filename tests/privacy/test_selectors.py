"""Neighbouring sets exceed the costs that DP-SAPF states, or omits, for its selectors. Each
statement of docs/papers.md is a number here.
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
    """The largest P(A | D′) − e^ε·P(A | D): the δ that the claim of ε needs.

    D′ has one image more, whose clipped gradient lies in one entry: that entry is N(1, σ²) in place
    of N(0, σ²), in units of the clip, and A is what exceeds the best threshold, where the
    likelihood ratio is e^ε.
    """
    threshold = 0.5 + claimed * noise_multiplier**2
    with_it = norm.sf(threshold, 1, noise_multiplier)
    without = norm.sf(threshold, 0, noise_multiplier)
    return float(with_it - math.exp(claimed) * without)


@pytest.mark.parametrize("budget", PRINTED)
def test_gaussian_selection_at_sigma_5_exceeds_its_share(budget):
    """A share s of the Rényi cost of ε is a Gaussian of σ(ε)/√s.

    At σ = 5, two neighbouring sets differ by more.
    """
    whole = calibrate({"all": NoiseRequest()}, budget, DELTA)["all"].noise_multiplier
    claimed = cost(whole / math.sqrt(PRINTED[budget]))
    assert excess(5.0, claimed) > 100 * DELTA
    assert excess(5.0, cost(5.0)) <= DELTA  # the real cost is a bound


def peeled(scores: list[float], picks: list[int], beta: float) -> float:
    """ln of the probability that the exponential mechanism picks these, one after the other: ∝
    exp(β·score/2).
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
    """14 of 48 matrices, scores in clips: an image whose gradient is spread over the 14 moves each
    by 1/√14.

    Charged as one pick, e^β is exceeded; c picks stay within e^{cβ}, and here near √c·β/2.
    """
    matrices = 48
    picks = list(range(14))
    whole = [1 / math.sqrt(14) if k in picks else 0.0 for k in range(matrices)]
    assert sum(score**2 for score in whole) == pytest.approx(1)  # one image's clipped gradient
    loss = peeled(whole, picks, beta) - peeled([0.0] * matrices, picks, beta)
    assert beta < loss <= 14 * beta


def test_one_image_in_one_matrix_moves_its_score_by_the_clip():
    """So a score's sensitivity is the clip, and not the clip over √(number of matrices)."""
    loss = peeled([1.0, *[0.0] * 47], [0], 1.0) - peeled([0.0] * 48, [0], 1.0)
    assert loss > 0.4 > 0.5 / math.sqrt(48)


def released(gap: int, name: str, beta: float, delta: float) -> dict[str, float]:
    """Propose-test-release: the best set as it is, where distance + Laplace(1/β) > ln(1/δ′)/β; else
    nothing.

    gap: neighbours that the best set is from another, 0 where one image more changes it.
    """
    passes = (
        0.5 * math.exp(-(math.log(1 / delta) - gap * beta))
        if gap * beta <= math.log(1 / delta)
        else 1.0
    )
    return {name: passes, "nothing": 1 - passes}


@pytest.mark.parametrize("delta", [1e-3, DELTA])
def test_propose_test_release_adds_its_own_delta(delta):
    """Two neighbouring sets whose best sets differ: what one may release, the other never does."""
    one = released(0, "A", 0.1, delta)
    other = released(0, "B", 0.1, delta)
    # Rényi divergence of every order above 1: infinite
    assert one["A"] > 0 and other.get("A", 0.0) == 0.0
    for claimed in (0.1, 1.0, 10.0):
        best = max(
            sum(one.get(out, 0.0) - math.exp(claimed) * other.get(out, 0.0) for out in event)
            for size in (1, 2)
            for event in itertools.combinations(("A", "B", "nothing"), size)
        )
        assert best == pytest.approx(delta / 2)  # for any ε
