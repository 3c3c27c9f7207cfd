"""What a composition of mechanisms means for an attacker: how much better than guessing anyone can tell whether one image was used.

Everything follows from the privacy profile, delta as a function of epsilon: it bounds the trade-off between false alarms and hits of
every test, however much else its author knows (Wasserman & Zhou 2010; Dong, Roth & Su 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent
from dp_accounting.pld import PLDAccountant

from sfumato.errors import BudgetError
from sfumato.privacy.accountant import ORDERS, RELATIONS, rdp_curve, round_up
from sfumato.privacy.events import ADD_OR_REMOVE_ONE

# Fine where e^epsilon · 1 % is below 1, coarse up to where nothing is left to bound.
EPSILONS = np.concatenate([np.arange(0, 6, 0.025), np.arange(6, 20.5, 0.5)])


@dataclass(frozen=True)
class Profile:
    """The composition is (epsilons[i], deltas[i])-DP for every i. epsilons: (E,) rising from 0; deltas: (E,) in [0, 1], never rising.

    `advantage_bound`: a bound on the membership advantage that is known otherwise, or 1.
    """

    epsilons: np.ndarray
    deltas: np.ndarray
    advantage_bound: float = 1.0


def privacy_profile(events: Iterable[DpEvent], adjacency: str = ADD_OR_REMOVE_ONE, pld: bool = True) -> Profile:
    """The profile of the composition of all events: the better of Rényi and privacy-loss distribution at each epsilon.

    `pld=False` uses the Rényi curve alone, which is quicker and looser; so do events that dp-accounting has no distribution of.
    Guarantee: an upper bound on delta in both directions of the adjacency. Nothing finite known: delta 1 everywhere.
    """
    if adjacency not in RELATIONS:
        raise BudgetError(f"adjacency={adjacency!r} is unknown: one of {', '.join(RELATIONS)}")
    events = list(events)
    if not events:
        return Profile(EPSILONS, np.zeros(len(EPSILONS)), 0.0)
    whole = ComposedDpEvent(events)
    curve = rdp_curve(whole)
    deltas = deltas_of_rdp(curve)
    if pld:
        accountant = PLDAccountant(RELATIONS[adjacency])
        if accountant.supports(whole):
            accountant.compose(whole)
            found = np.array([accountant.get_delta(float(e)) for e in EPSILONS])
            deltas = np.minimum(deltas, np.where(np.isfinite(found) & (found >= 0), found, 1.0))
    return Profile(EPSILONS, np.minimum.accumulate(deltas), advantage_of_rdp(curve))


def deltas_of_rdp(curve: np.ndarray) -> np.ndarray:
    """(E,) delta at each of EPSILONS from an RDP curve over ORDERS: the inverse of `accountant.conversion`, best order each."""
    orders = np.array(ORDERS)[:, None]
    exponents = (orders - 1) * (curve[:, None] + np.log1p(-1 / orders) - EPSILONS) - np.log(
        orders
    )  # (orders, E), ln delta
    return np.exp(np.minimum(exponents.min(axis=0), 0.0))


def advantage_of_rdp(curve: np.ndarray) -> float:
    """Total variation bounded by the Kullback-Leibler divergence, which no Rényi divergence is below (Pinsker; Bretagnolle & Huber)."""
    divergence = float(curve.min())
    return min(1.0, np.sqrt(divergence / 2), np.sqrt(-np.expm1(-divergence)))


def membership_advantage(profile: Profile) -> float:
    """The most by which any attacker's hit rate can exceed the false-alarm rate, in [0, 1]: the total variation of the outcomes.

    With even odds beforehand, a guess is right with probability at most (1 + advantage) / 2.
    Guarantee: no test of "was this image used?" does better, whatever else is known. At epsilon 0 the advantage is delta; each other
    (epsilon, delta) allows (e^epsilon − 1 + 2 delta) / (e^epsilon + 1), which counts where only the Rényi curve is known.
    """
    ratio = np.tanh(profile.epsilons / 2)  # (e^epsilon − 1) / (e^epsilon + 1)
    allowed = ratio + (1 - ratio) * profile.deltas
    return float(min(1.0, allowed.min(), profile.advantage_bound))


def true_positive_rate(profile: Profile, false_positive_rate: float = 0.01) -> float:
    """The largest share of used images that any attacker finds while wrongly accusing `false_positive_rate` of the others.

    Guarantee: with alpha the false-positive rate, no test does better than the least of e^epsilon·alpha + delta,
    1 − e^−epsilon·(1 − delta − alpha) and alpha + advantage over the profile: both directions of the adjacency.
    """
    if not 0 <= false_positive_rate <= 1:
        raise BudgetError(f"false_positive_rate={false_positive_rate} must lie in [0, 1]")
    forward = np.exp(profile.epsilons) * false_positive_rate + profile.deltas
    backward = 1 - np.exp(-profile.epsilons) * (1 - profile.deltas - false_positive_rate)
    most = min(1.0, forward.min(), backward.min(), false_positive_rate + membership_advantage(profile))
    return float(max(false_positive_rate, most))


def bound_text(value: float, digits: int = 4) -> str:
    """A cost in so many significant digits, rounded up: what is printed is never less than what is true."""
    if not 0 < value < math.inf:
        return "∞" if value > 0 else "0"
    return f"{round_up(value, digits):g}"
