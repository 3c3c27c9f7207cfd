"""Bound a mechanism by numbers of right and wrong guesses, at a stated confidence.

jax-privacy has such estimators too, but it needs JAX, and dp-accounting has none: these are short.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.stats import beta, binom, norm


def clopper_pearson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """Compute the exact interval of a probability.

    It is wrong in at most 1 − confidence of all experiments.
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
    """Bound μ of a Gaussian mechanism from below and above by one test fixed beforehand.

    hits, false_alarms: how often the test answered "in" for `runs` releases with the image, and for
    as many without it. A test of power β at level α exists for a μ-GDP mechanism only if Φ⁻¹(β) −
    Φ⁻¹(α) ≤ μ. The lower bound exceeds the true μ in at most (1 − confidence) of all audits; the
    upper one applies to this test only, and is no proof of privacy.

    Source: Dong, Roth and Su 2019; Nasr et al. 2023.
    """
    each = (1 + confidence) / 2  # both intervals may be wrong
    low_hits, high_hits = clopper_pearson(hits, runs, each)
    low_false, high_false = clopper_pearson(false_alarms, runs, each)
    return float(norm.ppf(low_hits) - norm.ppf(high_false)), float(
        norm.ppf(high_hits) - norm.ppf(low_false)
    )


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Return the most probability that an (ε, δ)-private mechanism gives to so many hits.

    Each of `canaries` images was in the set by a fair coin; `guesses` of them were guessed.

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
    """Return a function from an event's probability with an image to its least without it.

    It also covers the reverse direction. The mechanism is (ε, δ)-private for each ε ≥ 0 of
    `epsilons` with its δ. More of them bound it closer from below.
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
    """Return whether so many right guesses are rarer than `false_alarms` under this `least_chance`.

    p_i is the chance of i right guesses. Over i = j, j + 1, …, `right` sums p_i i / canaries,
    `wrong` sums p_i (guesses − i) / canaries. Flip the coin of a canary that is guessed right: one
    guess less is right. So `wrong` at j − 1 is at least `least` of `right` at j. Both grow as j
    falls; at 0 they sum up to guesses / canaries at most.

    Source: Mahloujifar, Melis and Chaudhuri 2024 (arXiv 2410.22235), Theorem 8 and Algorithm 3, of
    two choices.
    """
    right = false_alarms * correct / canaries
    wrong = false_alarms * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        more = max(wrong, least(right))
        right = min(1.0, right + (more - wrong) * i / (guesses - i))
        wrong = more
    return right + wrong > guesses / canaries


def guess(scores: np.ndarray, inside: np.ndarray, guesses: int) -> int:
    """Count right guesses: "in" for the highest scores, "out" for equally many lowest."""
    order = np.argsort(scores)
    out, into = order[: guesses // 2], order[len(order) - (guesses - guesses // 2) :]
    return int((~inside[out]).sum() + inside[into].sum())
