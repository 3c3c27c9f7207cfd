"""Bound a mechanism's privacy by counting right and wrong guesses, at a stated confidence.

jax-privacy has such estimators, but needs JAX; dp-accounting has none. So this module implements
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.stats import beta, binom, norm


def clopper_pearson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """Compute the exact confidence interval of a probability.

    The interval misses the probability in at most 1 − confidence of all experiments.
    """
    tail = (1 - confidence) / 2
    low = float(beta.ppf(tail, successes, trials - successes + 1)) if successes else 0.0
    high = (
        float(beta.ppf(1 - tail, successes + 1, trials - successes)) if successes < trials else 1.0
    )
    return low, high


def gaussian_bounds(
    hits: int, false_alarms: int, runs: int, confidence: float
) -> tuple[float, float]:
    """Bound μ of a Gaussian mechanism from below and above, using one test fixed beforehand.

    hits: number of releases that the test judged to contain the image, among `runs` releases with
    it; false_alarms: the same among `runs` releases without the image. A test of power β at level α
    exists for a μ-GDP mechanism only if Φ⁻¹(β) − Φ⁻¹(α) ≤ μ. The lower bound exceeds the true μ in
    at most (1 − confidence) of all audits. The upper bound applies to this test only: it does not
    prove privacy.

    Source: Dong, Roth and Su 2019; Nasr et al. 2023.
    """
    each = (1 + confidence) / 2  # splits the failure probability over two intervals
    low_hits, high_hits = clopper_pearson(hits, runs, each)
    low_false, high_false = clopper_pearson(false_alarms, runs, each)
    return float(norm.ppf(low_hits) - norm.ppf(high_false)), float(
        norm.ppf(high_hits) - norm.ppf(low_false)
    )


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Bound the probability of `correct` or more right guesses, for any (ε, δ)-private mechanism.

    Fair coins decided which of the `canaries` images were in the set. The attacker guessed the
    coins of `guesses` images.

    Source: Steinke, Nasr and Jagielski 2023, Theorem 5.2.
    """
    right = 1 / (1 + math.exp(-epsilon))
    fewer = np.arange(1, correct + 1)
    alpha = float((binom.pmf(correct - fewer, guesses, right).cumsum() / fewer).max(initial=0.0))
    return min(1.0, float(binom.sf(correct - 1, guesses, right)) + 2 * alpha * delta * canaries)


def one_run_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float
) -> float:
    """Return the largest ε that the guesses rule out at this confidence, or 0 if there is none."""
    low, high = 0.0, 50.0
    if one_run_p_value(canaries, guesses, correct, low, delta) > 1 - confidence:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        if one_run_p_value(canaries, guesses, correct, middle, delta) <= 1 - confidence:
            low = middle
        else:
            high = middle
    return low


def least_chance(epsilons: np.ndarray, deltas: np.ndarray) -> Callable[[float], float]:
    """Return a function that bounds an event's probability after adding or removing one image.

    The function takes the event's probability before the change, and returns a lower bound on its
    probability after the change. The mechanism must be (ε, δ)-private for each ε ≥ 0 in `epsilons`
    and its δ in `deltas`. More pairs give a tighter bound.
    """
    up, down = np.exp(epsilons), np.exp(-epsilons)

    def least(chance: float) -> float:
        return float(
            np.maximum((chance - deltas) * down, 1 - deltas - up * (1 - chance)).max(initial=0.0)
        )

    return least


def refutes_f_dp(
    canaries: int, guesses: int, correct: int, least: Callable[[float], float], false_alarms: float
) -> bool:
    """Return whether `correct` or more right guesses have a probability below `false_alarms`.

    The probability is for a mechanism with the bound `least`, which `least_chance` returns.

    Suppose that `correct` or more right guesses have the probability `false_alarms`. For each j,
    two probabilities are considered. `right` is the probability that at least j guesses are right,
    and that one of them is for a canary drawn at random. `wrong` is the same for a wrong guess of
    the drawn canary. If the coin of a rightly guessed canary is flipped, its guess becomes wrong,
    and at least j − 1 guesses are right. So `wrong` at j − 1 is at least `least(right)` at j. The
    loop computes such lower bounds of `right` and `wrong`, down to j = 0. There, the two
    probabilities add up to at most guesses / canaries. If their lower bounds add up to more, the
    assumption is false.

    Source: Mahloujifar, Melis and Chaudhuri 2024 (arXiv 2410.22235), Theorem 8 and Algorithm 3, for
    guesses with two possible answers, "in" and "out".
    """
    right = false_alarms * correct / canaries
    wrong = false_alarms * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        more = max(wrong, least(right))
        right = min(1.0, right + (more - wrong) * i / (guesses - i))
        wrong = more
    return right + wrong > guesses / canaries


def guess(scores: np.ndarray, inside: np.ndarray, guesses: int) -> int:
    """Guess "in" for the highest scores and "out" for the lowest, and count the right guesses.

    Half of the `guesses` are "in", the other half "out".
    """
    order = np.argsort(scores)
    out, into = order[: guesses // 2], order[len(order) - (guesses - guesses // 2) :]
    return int((~inside[out]).sum() + inside[into].sum())
