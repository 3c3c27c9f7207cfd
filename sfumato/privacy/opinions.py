"""Compute a ledger's cost by Opacus's accountants too, so that a mistake in one library is noticed.

Every accountant computes an upper bound on the same ε. The bound by the ledger's accountant is
compared with a second bound and its largest possible error. If the second bound minus this error is
more than 1 % above the first bound, one of the two is wrong, and the check must fail.

- RDP: Opacus's curve is compared with ours, at the orders that Opacus can compute. Both curves are
  converted to ε in the same way.
- PLD: The bound by Opacus's PRV accountant, which exceeds the true value by at most twice its
  `eps_error`, is compared with the bound by `pld`.
- exact: Our PLD bound and Opacus's PRV bound are compared with the bound by `exact`. The bound by
  `exact` is itself compared with Rényi's bound, which must not be smaller.
"""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from sfumato.errors import UNREADABLE
from sfumato.privacy.accountant import (
    ACCOUNTANTS,
    EXACT,
    LARGEST_PLD,
    ORDERS,
    SMALLEST_PLD_DELTA,
    epsilon,
    epsilon_and_order,
    rdp_curve,
)
from sfumato.privacy.events import Mechanism, common_adjacency, event_of
from sfumato.storage.digest import digest_of
from sfumato.storage.documents import read_json, validated
from sfumato.storage.files import replace_private

# Largest error of an ε that is computed with our privacy-loss distribution, if δ is at least
# SMALLEST_PLD_DELTA
PLD_ERROR = 2e-3


@dataclass(frozen=True)
class Opinion:
    """One accountant's result for a composition.

    epsilon: result, or None if the accountant cannot compute a useful bound;
    kind: name of our accountant with which the result is compared;
    ours: ε by that accountant;
    error: largest amount by which `epsilon` can exceed the true value.
    """

    epsilon: float | None
    kind: str
    ours: float
    error: float = 0.0

    @property
    def disagrees(self) -> bool:
        return self.epsilon is not None and not self.epsilon - self.error <= 1.01 * self.ours

    def __str__(self) -> str:
        if self.epsilon is None:
            return "n/a"
        return f"{self.epsilon:.4f}"


def own_opinions(
    records: Sequence[Mapping], delta: float, accountant: str = "rdp"
) -> dict[str, Opinion]:
    """Compute epsilon of the records at `delta` by our four accountants.

    accountant: accountant of the ledger.
    """
    events = [event_of(record) for record in records]
    adjacency = common_adjacency(records)
    bounds = {name: epsilon(events, delta, name, adjacency) for name in ACCOUNTANTS}
    opinions = {name: Opinion(value, name, value) for name, value in bounds.items()}
    if accountant == EXACT:
        if delta >= SMALLEST_PLD_DELTA:
            opinions["pld"] = Opinion(bounds["pld"], EXACT, bounds[EXACT], PLD_ERROR)
        opinions[EXACT] = Opinion(bounds[EXACT], "rdp", bounds["rdp"], PLD_ERROR)
    return opinions


def all_opinions(
    records: Sequence[Mapping], delta: float, accountant: str = "rdp"
) -> dict[str, Opinion]:
    """Compute epsilon of the records at `delta` by every accountant: our four, then Opacus's two.

    accountant: accountant of the ledger.
    """
    opinions = own_opinions(records, delta, accountant)
    bounds = {name: opinion.epsilon or 0.0 for name, opinion in opinions.items()}
    parts = [Mechanism.from_json(record["event"]) for record in records]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # Opacus warns if the best order is the first or the last. These warnings are hidden
        warnings.simplefilter("ignore")
        opinions |= {
            "Opacus RDP": opacus_rdp(parts, delta),
            "Opacus PRV": opacus_prv(parts, delta, bounds["pld"]),
        }
    if accountant == EXACT:
        opinions["Opacus PRV"] = replace(opinions["Opacus PRV"], kind=EXACT, ours=bounds[EXACT])
    return opinions


def kept_opinions(
    records: Sequence[Mapping], delta: float, accountant: str, state: Path | None
) -> dict[str, Opinion]:
    """Return `all_opinions`, from the cache if the same records were checked here before.

    The cache avoids importing Opacus, which is slow. It is kept in the private state directory
    only, so that the author of a ledger cannot supply cached results.
    """
    versions = [version(name) for name in ("sfumato", "opacus", "dp-accounting")]
    cache_key = {
        "records": list(records),
        "delta": delta,
        "accountant": accountant,
        "versions": versions,
    }
    if state is None or not state.is_dir():
        return all_opinions(records, delta, accountant)
    file = state / "cache/opinions" / f"{digest_of(cache_key)}.json"
    with suppress(*UNREADABLE):
        return validated(dict[str, Opinion], read_json(file))
    opinions = all_opinions(records, delta, accountant)
    with suppress(OSError, ValueError):  # The disk is full, or JSON cannot express a number
        content = {name: vars(opinion) for name, opinion in opinions.items()}
        replace_private(file, json.dumps(content, allow_nan=False).encode())
    return opinions


def disagreements(opinions: Mapping[str, Opinion], accountant: str) -> list[str]:
    """List the opinions that contradict the ledger's accountant, one sentence each.

    `rdp_classic` is checked through `rdp`, whose curve it uses.
    """
    kinds = {"pld": ("pld",), EXACT: (EXACT, "rdp")}.get(accountant, ("rdp",))
    return [
        f"{name} computes epsilon={opinion}, but {opinion.kind} computes {opinion.ours:.4f}: one "
        "of the two is wrong"
        for name, opinion in opinions.items()
        if opinion.kind in kinds and opinion.disagrees
    ]


def opacus_rdp(parts: Sequence[Mechanism], delta: float) -> Opinion:
    """Compute epsilon from Opacus's Rényi curve and, for `Opinion.ours`, from our own curve.

    Both are computed at the orders that Opacus can compute.
    """
    from opacus.accountants.analysis.rdp import compute_rdp

    theirs = np.full(len(ORDERS), np.inf)
    terms = [
        {"q": part.sample_rate, "noise_multiplier": part.noise_multiplier, "steps": part.uses}
        for part in parts
    ]
    for i, order in enumerate(ORDERS):
        # At orders below 2, Opacus sums long series; above 1024, its binomial coefficients
        # overflow.
        if 2 <= order <= 1024:
            with suppress(ValueError, OverflowError):  # a series that floats cannot represent
                theirs[i] = sum(compute_rdp(**term, orders=float(order)) for term in terms)
    finite = np.isfinite(theirs)
    if not finite.any():
        return Opinion(None, "rdp", math.inf)
    curves = (
        np.where(finite, curve, np.inf)
        for curve in (theirs, rdp_curve(part.event for part in parts))
    )
    spent, ours = (epsilon_and_order(curve, delta)[0] for curve in curves)
    return Opinion(spent, "rdp", ours)


def opacus_prv(parts: Sequence[Mechanism], delta: float, pld: float) -> Opinion:
    """Compute epsilon by Opacus's PRV accountant, which discretizes the privacy loss.

    pld: epsilon by our own accountant `pld`.
    """
    from opacus.accountants import PRVAccountant

    none = Opinion(None, "pld", pld)
    if not parts or not pld <= LARGEST_PLD:
        return none
    # The accountant's grid spans twice `span`, in steps of
    # error / sqrt(uses · ln(12 / delta_error) / 2).
    span = epsilon([part.event for part in parts], delta / 4000) + 3
    uses = sum(part.uses for part in parts)
    # 2**20 points take about a second per mechanism.
    coarsest = 2 * span * math.sqrt(uses * math.log(12_000 / delta) / 2) / 2**20
    error = max(pld / 1000, coarsest)
    if error > 0.1:  # such a coarse grid gives no usable epsilon
        return none
    accountant = PRVAccountant()
    accountant.history = [(part.noise_multiplier, part.sample_rate, part.uses) for part in parts]
    try:
        return Opinion(float(accountant.get_epsilon(delta, eps_error=error)), "pld", pld, 2 * error)
    except (ValueError, RuntimeError):  # the accountant finds the grid too coarse
        return none
