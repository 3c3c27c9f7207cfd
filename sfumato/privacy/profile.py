"""Bound how well any attacker can detect whether one unit (image or person) was used.

All bounds are computed from the privacy profile: delta as a function of epsilon. The profile bounds
the hit rate of any attacker at a given false-alarm rate, regardless of the attacker's other
knowledge.

Source: Wasserman & Zhou 2010; Dong, Roth & Su 2022.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from sfumato.errors import BudgetError
from sfumato.privacy.accountant import ORDERS, loss_distribution, rdp_curve, relation, round_up
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, ADJACENCIES, Mechanism

if TYPE_CHECKING:
    from dp_accounting import DpEvent

# Fine steps up to 6: above 6, e^epsilon times a false-positive rate of 1 % is far above 1, which
# bounds no probability. Coarse steps up to 20: above 20, all bounds are trivial.
EPSILONS = np.concatenate([np.arange(0, 6, 0.025), np.arange(6, 20.5, 0.5)])
# Orders up to 2 suffice to bound the advantage: the divergence rises with the order, so higher
# orders give weaker bounds
LOW_ORDERS = tuple(order for order in ORDERS if order <= 2)


@dataclass(frozen=True)
class Profile:
    """Points of a privacy profile: the composition is (epsilons[i], deltas[i])-DP for every i.

    epsilons: (E,) rising from 0;
    deltas: (E,) in [0, 1], never rising;
    advantage_bound: bound on the membership advantage; 1 if none is known.
    """

    epsilons: np.ndarray
    deltas: np.ndarray
    advantage_bound: float = 1.0


def privacy_profile(events: Iterable[DpEvent], adjacency: str = ADD_OR_REMOVE_ONE) -> Profile:
    """Compute the profile of the composition of all events.

    At each epsilon, delta is the smaller of two bounds: Rényi's, and the one from the privacy-loss
    distribution.

    Guarantee: the result is an upper bound on delta in both directions of the adjacency. If no
    finite bound is known, delta is 1.
    """
    if adjacency not in ADJACENCIES:
        raise BudgetError(
            f"adjacency={adjacency!r} is unknown: expected one of {', '.join(ADJACENCIES)}"
        )
    # Sorted as in `epsilon`, so that both functions share one cached distribution.
    events = sorted(events, key=repr)
    if not events:
        return Profile(EPSILONS, np.zeros(len(EPSILONS)), 0.0)
    curve = rdp_curve(events)
    distribution = loss_distribution(tuple(events), adjacency)
    by_losses = np.array([distribution.get_delta(float(e)) for e in EPSILONS])
    deltas = np.minimum(
        deltas_of_rdp(curve), np.where(np.isfinite(by_losses) & (by_losses >= 0), by_losses, 1.0)
    )
    return Profile(EPSILONS, np.minimum.accumulate(deltas), advantage_of_rdp(curve))


def deltas_of_rdp(curve: np.ndarray) -> np.ndarray:
    """Compute delta at each of EPSILONS, (E,), from an RDP curve over ORDERS.

    This inverts `accountant.conversion` at the best order.
    """
    orders = np.array(ORDERS)[:, None]
    # ln delta, (orders, E)
    exponents = (orders - 1) * (curve[:, None] + np.log1p(-1 / orders) - EPSILONS) - np.log(orders)
    return np.exp(np.minimum(exponents.min(axis=0), 0.0))


def advantage_of_rdp(curve: np.ndarray) -> float:
    """Bound the total variation between the outcomes with and without one unit.

    The result follows from a bound on the Kullback-Leibler divergence. Each Rényi divergence of
    `curve` is such a bound.

    Source: Pinsker; Bretagnolle & Huber.
    """
    divergence = float(curve.min())
    return min(1.0, np.sqrt(divergence / 2), np.sqrt(-np.expm1(-divergence)))


def membership_advantage(profile: Profile) -> float:
    """Bound, in [0, 1], how far any attacker's hit rate can exceed their false-alarm rate.

    The result is an upper bound on the total variation between the outcomes with and without one
    unit. If the unit was used with probability 1/2, a guess is right with probability at most
    (1 + advantage) / 2.

    Each point of the profile gives the bound (e^epsilon − 1 + 2 delta) / (e^epsilon + 1). At
    epsilon 0, this bound is delta. The result is the smallest of these bounds and
    `advantage_bound`.

    Guarantee: no test of "was this unit used?" does better, regardless of any other knowledge.
    """
    ratio = np.tanh(profile.epsilons / 2)  # (e^epsilon − 1) / (e^epsilon + 1)
    allowed = ratio + (1 - ratio) * profile.deltas
    return float(min(1.0, allowed.min(), profile.advantage_bound))


@lru_cache(maxsize=512)  # Plans of one process often have the same mechanisms
def best_guess(
    mechanisms: tuple[Mechanism, ...], adjacency: str = ADD_OR_REMOVE_ONE, noise: float = 1.0
) -> float:
    """Bound the probability that any attacker guesses correctly whether one unit was used.

    The unit is used with probability 1/2, so the result lies in [1/2, 1]. The grid of privacy
    losses is coarser than in `privacy_profile`, so computing the result takes only a tenth of a
    second.

    noise: factor applied to all noise multipliers.

    Guarantee: no test does better, regardless of any other knowledge.
    """
    events = [
        replace(mechanism, noise_multiplier=mechanism.noise_multiplier * noise).event
        for mechanism in mechanisms
    ]
    from dp_accounting import ComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    # 5e-3 is a coarse grid, for speed.
    distribution = PLDAccountant(relation(adjacency), 5e-3).compose(ComposedDpEvent(events))
    advantage = min(advantage_of_rdp(rdp_curve(events, LOW_ORDERS)), distribution.get_delta(0.0))
    return float((1 + advantage) / 2)


def noise_for_guess(
    mechanisms: tuple[Mechanism, ...], guess: float, adjacency: str = ADD_OR_REMOVE_ONE
) -> float:
    """Find the smallest factor for all noise multipliers at which `best_guess` is at most `guess`.

    The factor is accurate within 1 %. guess: probability above 1/2.
    """
    steps = bisect_left(
        range(2000), True, key=lambda i: best_guess(mechanisms, adjacency, 1.01**i) <= guess
    )
    return float(1.01**steps)


def true_positive_rate(profile: Profile, false_positive_rate: float = 0.01) -> float:
    """Bound any attacker's true-positive rate at a given false-positive rate.

    Guarantee: let alpha be the false-positive rate. No test does better than
    alpha + `membership_advantage` or, at any point of the profile, than e^epsilon·alpha + delta or
    1 − e^−epsilon·(1 − delta − alpha). The result is the smallest of these bounds. It covers both
    directions of the adjacency.
    """
    if not 0 <= false_positive_rate <= 1:
        raise BudgetError(f"false_positive_rate={false_positive_rate} must lie in [0, 1]")
    forward = np.exp(profile.epsilons) * false_positive_rate + profile.deltas
    backward = 1 - np.exp(-profile.epsilons) * (1 - profile.deltas - false_positive_rate)
    bound = min(
        1.0, forward.min(), backward.min(), false_positive_rate + membership_advantage(profile)
    )
    return float(max(false_positive_rate, bound))


def bound_text(value: float, digits: int = 4) -> str:
    """Format a cost, rounded upwards to `digits` significant digits so as not to understate it."""
    if not 0 < value < math.inf:
        return "∞" if value > 0 else "0"
    return f"{round_up(value, digits):g}"


def percent_up(share: float) -> str:
    """Format a share in per cent with one decimal, rounded up so that it is never understated."""
    return f"{min(100.0, math.ceil(1000 * share - 1e-9) / 10):.1f}".removesuffix(".0")
