"""Compute the cost of mechanisms, and calibrate noise to a budget.

Costs are upper bounds on ε. They are computed by RDP, by PLD or, for Gaussians over all images, by
a closed form. RDP is converted to ε in two ways: by a tight formula, and by the classic formula
that papers use. dp-accounting provides the Rényi curves, the privacy-loss distributions and the
closed form. This module adds the conversion from RDP to ε and the solver for shares of the budget.
A Rényi order at which the RDP cannot be computed counts as infinitely expensive, not as free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from sfumato.errors import BudgetError, ConfigError
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, ADJACENCIES, ZERO_OUT_ONE, Mechanism
from sfumato.settings.fields import is_positive
from sfumato.settings.privacy import FEWEST_UNITS, MOST_UNITS

if TYPE_CHECKING:  # imported inside the functions that use it, because the import takes a second
    from dp_accounting import DpEvent, NeighboringRelation
    from dp_accounting.pld import PLDAccountant

# Upper limit of δ: with probability δ there is no guarantee, so larger values are refused
LARGEST_DELTA = 1e-3
# Rényi orders. The best order of an expensive mechanism is near 1, so the steps are small near 1.
# The best order of a cheap mechanism is large, so the orders reach 4096.
ORDERS: tuple[float, ...] = (
    *(1 + x / 20 for x in range(1, 60)),
    *(4 + x / 4 for x in range(24)),
    *range(10, 64),
    *range(64, 128, 4),
    *range(128, 256, 16),
    *range(256, 1025, 64),
    *(1536, 2048, 3072, 4096),
)
# Below this δ, a privacy-loss distribution may give a larger ε than Rényi's bound. It leaves out
# tails with a probability of 1e-15 and, to stay valid, adds this probability to δ
SMALLEST_PLD_DELTA = 1e-13
LARGEST_PLD = 100.0  # Largest ε by RDP for which `epsilon` uses a privacy-loss distribution
ROOT_ERROR = 1e-11  # Error of an exact ε: ten times the tolerance of dp-accounting's search
LEAST_NOISE = 0.05  # Lower end of the search for a noise multiplier
MOST_NOISE = 1e7  # Upper end of the search
EXACT = "exact"
BOUNDS = ("rdp", "rdp_classic", "pld")  # Every ledger states ε by each of these accountants
ACCOUNTANTS = (*BOUNDS, EXACT)


def relation(adjacency: str) -> NeighboringRelation:
    """Return dp-accounting's name for one of ADJACENCIES."""
    from dp_accounting import NeighboringRelation

    relations = {
        ADD_OR_REMOVE_ONE: NeighboringRelation.ADD_OR_REMOVE_ONE,
        ZERO_OUT_ONE: NeighboringRelation.REPLACE_SPECIAL,
    }
    return relations[adjacency]


def rdp_curve(events: Iterable[DpEvent], orders: tuple[float, ...] = ORDERS) -> np.ndarray:
    """Compute the Rényi divergence of the composition of all events at each order.

    Returns (len(orders),) float64. A divergence that cannot be computed is infinite.
    """
    return sum((_computed_curve(event, orders) for event in events), np.zeros(len(orders)))


@lru_cache(maxsize=65536)
def _computed_curve(event: DpEvent, orders: tuple[float, ...]) -> np.ndarray:
    from absl.logging import get_absl_logger
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(list(orders), relation(ADD_OR_REMOVE_ONE))
    logger = get_absl_logger()
    disabled = logger.disabled
    # dp-accounting warns about each order at which its computation does not converge. This function
    # returns infinity at these orders. The logger is disabled, because a change of its level would
    # clear the caches of all loggers.
    logger.disabled = True
    try:
        with np.errstate(all="ignore"):
            accountant.compose(event)
    finally:
        logger.disabled = disabled
    curve = np.array(accountant._rdp, dtype=float)  # there is no public attribute for the curve
    return np.where(np.isfinite(curve) & (curve >= 0), curve, np.inf)


def _mechanism_rdp(mechanism: Mechanism, order: float) -> float:
    return float(rdp_curve([mechanism.event], (order,))[0])


def default_delta(size_hint: int) -> float:
    """Return 1 / (size_hint · ln size_hint), at most LARGEST_DELTA."""
    return min(1 / (size_hint * math.log(size_hint)), LARGEST_DELTA)


def checked_delta(delta: float | None, size_hint: int, section: str = "") -> float:
    """Return δ for a release over `size_hint` units: `delta`, or the default if it is None.

    section: prefix of the names `size_hint` and `delta` in error messages, such as `privacy.`.
    Raises ConfigError if δ or the size is outside its limits.
    """
    if type(size_hint) is not int or not FEWEST_UNITS <= size_hint <= MOST_UNITS:
        limits = f"{FEWEST_UNITS} to {MOST_UNITS:g}"
        raise ConfigError(
            f"{section}size_hint={size_hint!r}: set it to a whole number from {limits}"
        )
    value = default_delta(size_hint) if delta is None else delta
    setting = f"{section}delta={delta!r}"
    if not is_positive(value):
        raise ConfigError(f"{setting} must be a probability above 0. Raise δ, or leave it out")
    if value > 1 / size_hint:
        limit = (
            f"1/{section}size_hint = {1 / size_hint:.3g}: such a δ would allow the data of one "
            "image or person to be published"
        )
        raise ConfigError(f"{setting} is above {limit}. Lower δ, or leave it out")
    if value > LARGEST_DELTA:
        limit = f"{LARGEST_DELTA:g}: δ is the probability that there is no guarantee"
        raise ConfigError(f"{setting} is above {limit}. Lower δ, or leave it out")
    return value


def conversion(order: float, delta: float, classic: bool = False) -> float:
    """Return the term that converts the RDP at an order α: epsilon is the RDP plus this term.

    classic: True for the term ln(1/δ)/(α−1), which papers use.

    Source: Canonne, Kamath & Steinke, Prop. 12, for the default term.
    """
    if classic:
        return -math.log(delta) / (order - 1)
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def epsilon_and_order(
    curve: np.ndarray, delta: float, classic: bool = False
) -> tuple[float, float]:
    """Return the smallest epsilon over all ORDERS, and the order at which it is reached.

    curve: RDP at each of ORDERS; classic: see `conversion`.
    """
    values = curve + np.array([conversion(a, delta, classic) for a in ORDERS])
    best = int(np.argmin(values))
    return max(0.0, float(values[best])), float(ORDERS[best])


def epsilon(
    events: Iterable[DpEvent],
    delta: float,
    accountant: str = "rdp",
    adjacency: str = ADD_OR_REMOVE_ONE,
) -> float:
    """Compute epsilon of the composition of all events at `delta`.

    `exact` uses the closed form if every event is a Gaussian over all images, and otherwise does
    the same as `pld`. `pld` rounds privacy losses up to a grid of 1e-4. All accountants assume that
    the events were fixed in advance. `docs/concepts.md` describes what is proven if the choice of
    an event depended on earlier releases.

    Args:
        events: dp-accounting events, such as `Mechanism.event`.
        delta: In (0, 1).
        accountant: `rdp`, `rdp_classic`, `pld` or `exact`.
        adjacency: Neighbour relation, `add-or-remove-one` or `zero-out-one`.

    Returns:
        Epsilon. It is infinite if no finite bound is known, and 0 if there are no events.

    Source:
        Balle & Wang 2018, theorem 8, and Dong, Roth & Su 2022, corollary 2, for the closed form.
    """
    # Sorted, so that the result does not depend on the order of the events, not even in its last
    # bits.
    events = sorted(events, key=repr)
    if not events:
        return 0.0
    if adjacency not in ADJACENCIES:
        raise BudgetError(
            f"adjacency={adjacency!r} is unknown: expected one of {', '.join(ADJACENCIES)}"
        )
    if not 0 < delta < 1:
        raise BudgetError(f"delta={delta} must lie in (0, 1)")
    if accountant in ("pld", EXACT):
        # Above LARGEST_PLD, the distribution takes gigabytes and minutes. Rényi's bound is still
        # valid.
        if (bound := epsilon(events, delta, "rdp", adjacency)) > LARGEST_PLD:
            return bound
        if accountant == EXACT and math.isfinite(square := math.fsum(map(squared_mu, events))):
            from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

            # A negligible mu leads to a division by zero.
            with np.errstate(divide="ignore"):
                return float(get_epsilon_gaussian(1 / math.sqrt(square), delta)) + ROOT_ERROR
        pld_epsilon = _pld_epsilon(tuple(events), delta, adjacency)
        return pld_epsilon if delta >= SMALLEST_PLD_DELTA else min(pld_epsilon, bound)
    if accountant not in ACCOUNTANTS:
        raise BudgetError(
            f"accountant={accountant!r} is unknown: expected one of {', '.join(ACCOUNTANTS)}"
        )
    # Zeroing an image and removing it lead to the same pair of Gaussians, and so to the same curve.
    return epsilon_and_order(rdp_curve(events), delta, accountant == "rdp_classic")[0]


@lru_cache(maxsize=1024)  # results are small, and a ledger check needs each several times
def _pld_epsilon(events: tuple[DpEvent, ...], delta: float, adjacency: str) -> float:
    return float(loss_distribution(events, adjacency).get_epsilon(delta))


def squared_mu(event: DpEvent) -> float:
    """Return μ² if an event is exactly μ-GDP, otherwise infinity.

    A Gaussian sum over all images is exactly μ-GDP, whether it is released once or several times.
    The μ² of several events add up.
    """
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent

    uses, base = (
        (event.count, event.event) if isinstance(event, SelfComposedDpEvent) else (1, event)
    )
    return uses / base.noise_multiplier**2 if isinstance(base, GaussianDpEvent) else math.inf


@lru_cache(maxsize=8)  # only a few, because each takes about 10 MB
def loss_distribution(events: tuple[DpEvent, ...], adjacency: str) -> PLDAccountant:
    """Compute the privacy-loss distribution of the composition of all events.

    The result is cached, because it takes a second or more.
    """
    from dp_accounting import ComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    return PLDAccountant(relation(adjacency)).compose(ComposedDpEvent(list(events)))


def round_up(value: float, digits: int = 4) -> float:
    """Round `value` upwards to `digits` significant digits."""
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    rounded = math.ceil(value * scale * (1 - 1e-12)) / scale
    return float(f"{rounded:.{digits}g}")


def smallest_noise(
    fits, low: float = LEAST_NOISE, high: float = MOST_NOISE, tolerance: float = 1e-5
) -> float:
    """Find the smallest noise multiplier for which `fits` returns True.

    fits: function of a noise multiplier. If it returns True for a multiplier, it must return True
    for all larger multipliers;
    tolerance: relative error of the result.

    Returns infinity if `fits` returns False even for `high`.
    """
    if not fits(high):
        return math.inf
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


@dataclass(frozen=True, kw_only=True)
class NoiseRequest:
    """A stage's request for budget: its sample rate, its number of uses, and its noise.

    A stage with neither a noise multiplier nor a share takes the rest of the budget.

    Args:
        sample_rate: Probability that a unit enters a draw.
        uses: Number of releases, each from a separate draw.
        noise_multiplier: Noise multiplier of the stage, if it is fixed.
        share: Share of the budget, in (0, 1), if the noise is given as a share.
    """

    sample_rate: float = 1.0
    uses: int = 1
    noise_multiplier: float | None = None
    share: float | None = None

    def with_noise(self, noise_multiplier: float) -> Mechanism:
        return Mechanism(
            noise_multiplier=noise_multiplier, sample_rate=self.sample_rate, uses=self.uses
        )


def reference_order(ask: NoiseRequest, target: float, delta: float) -> float:
    """Return the best order α for one Gaussian that uses the whole budget.

    The RDP of a Gaussian is α·ρ. The best order is the one that allows the largest ρ, among all
    orders at which the RDP of `ask` is finite. Raises BudgetError if there is no such order.
    """
    allowing = [order for order in ORDERS if target > conversion(order, delta)]
    allowing.sort(key=lambda order: (target - conversion(order, delta)) / order, reverse=True)
    # Best order first: each RDP takes long to compute, and the first finite one ends the loop
    for order in allowing:
        if math.isfinite(_mechanism_rdp(ask.with_noise(MOST_NOISE), order)):
            return order
    raise BudgetError(
        f"privacy.epsilon={target:g} cannot be met at delta={delta:.3g}: raise privacy.epsilon"
    )


def calibrate(
    asks: Mapping[str, NoiseRequest],
    target: float,
    delta: float,
    accountant: str = "rdp",
    adjacency: str = ADD_OR_REMOVE_ONE,
    before: Sequence[DpEvent] = (),
) -> dict[str, Mechanism]:
    """Compute mechanisms whose composition with `before` costs at most `target` at `delta`.

    At each order, the allowed RDP is `target`, minus the conversion term, minus the RDP of
    `before`.

    A share is a fraction of the whole budget's RDP at one order, `reference_order`. At this order,
    the whole budget's RDP is `target` minus the conversion term or, with the accountant `exact`,
    the RDP of one Gaussian with an ε of exactly `target`. `reference_order` depends only on the
    stage's sampling, the target and delta.

    The stage with neither a multiplier nor a share takes the rest, at the order that needs the
    least noise. With the accountants `pld` and `exact`, it instead gets the least noise at which
    the ε by this accountant is at most `target`.

    Computed multipliers are rounded upwards to 4 significant digits.

    Args:
        asks: Request of each stage, by its name; exactly one has neither a multiplier nor a share.
        target: Largest ε of the composition.
        delta: δ of the composition.
        accountant: See `epsilon`.
        adjacency: See `epsilon`.
        before: Events that have already been spent.

    Raises:
        BudgetError: The budget cannot be met. The message names the stage that costs most.
    """
    multipliers = {
        name: ask.noise_multiplier for name, ask in asks.items() if ask.noise_multiplier is not None
    }
    fixed = {name: asks[name].with_noise(noise) for name, noise in multipliers.items()}
    shares = {name: ask.share for name, ask in asks.items() if ask.share is not None}
    rests = [name for name in asks if name not in fixed and name not in shares]
    if len(rests) != 1:
        raise BudgetError(
            "exactly one stage must have `noise: rest`; stages that have it: "
            f"{', '.join(rests) or 'none'}"
        )
    rest = rests[0]
    if (shared := sum(shares.values())) >= 1:
        raise BudgetError(
            f"the shares of {', '.join(shares)} add up to {shared:.0%}, so nothing is left for "
            f"{rest}: lower the shares"
        )

    def with_found(name: str, noise: float) -> Mechanism:
        if not math.isfinite(noise):
            raise BudgetError(_infeasible(fixed, name, target, delta, accountant))
        return asks[name].with_noise(round_up(noise))

    solved = dict(fixed)
    for name, share in shares.items():
        solved[name] = with_found(
            name, noise_of_share(asks[name], share, target, delta, accountant)
        )

    best_noise = noise_of_rest(asks[rest], solved, before, target, delta)
    other_events = [*before, *(m.event for m in solved.values())]

    def total(noise: float) -> float:
        return epsilon(
            [*other_events, asks[rest].with_noise(noise).event], delta, accountant, adjacency
        )

    if accountant == EXACT:
        # The target requires less noise by the exact ε than by Rényi's bound. So the search can end
        # at 1.1 times the noise multiplier that Rényi's bound requires
        high = min(1.1 * best_noise, MOST_NOISE)
        best_noise = smallest_noise(
            lambda noise: total(round_up(noise)) <= target, high=high, tolerance=1e-4
        )
    if accountant == "pld":
        start = min(best_noise, MOST_NOISE)
        low = start / 2
        high = start * 1.1
        while low > LEAST_NOISE and total(low) <= target:
            high = low
            low /= 2
        best_noise = smallest_noise(
            lambda noise: total(noise) <= target, low=low, high=high, tolerance=2e-4
        )
    solved[rest] = with_found(rest, best_noise)
    return {name: solved[name] for name in asks}


def noise_of_share(
    ask: NoiseRequest, share: float, target: float, delta: float, accountant: str
) -> float:
    """Return the noise multiplier at which a stage uses a share of the whole budget."""
    order = reference_order(ask, target, delta)
    full_rdp = target - conversion(order, delta)
    # With `exact`, `full_rdp` is the RDP, at `order`, of one Gaussian with an ε of exactly `target`
    if accountant == EXACT:
        from dp_accounting.gaussian_mechanism import get_sigma_gaussian

        full_rdp = order / 2 / get_sigma_gaussian(target, delta) ** 2
    return smallest_noise(partial(_fits, ask, order, share * full_rdp))


def noise_of_rest(
    ask: NoiseRequest,
    solved: Mapping[str, Mechanism],
    before: Sequence[DpEvent],
    target: float,
    delta: float,
) -> float:
    """Return the smallest noise multiplier with which all stages together meet the target.

    Meeting the target at one of ORDERS is enough.
    """
    spent_rdp = dict(zip(ORDERS, rdp_curve(before), strict=True))
    # Computed at all orders and cached, because the plan and every ledger need these curves too
    curves = [rdp_curve([m.event]) for m in solved.values()]
    best_noise = math.inf
    for index, order in enumerate(ORDERS):
        remaining_rdp = target - conversion(order, delta) - spent_rdp[order]
        remaining_rdp -= sum(float(curve[index]) for curve in curves)
        fits = partial(_fits, ask, order, remaining_rdp)
        if remaining_rdp > 0 and (not math.isfinite(best_noise) or fits(best_noise * (1 - 1e-5))):
            best_noise = min(best_noise, smallest_noise(fits, high=min(best_noise, MOST_NOISE)))
    return best_noise


def _fits(ask: NoiseRequest, order: float, max_rdp: float, noise: float) -> bool:
    """Return whether the RDP of a request with this noise is at most `max_rdp`."""
    return _mechanism_rdp(ask.with_noise(noise), order) <= max_rdp


def _infeasible(
    fixed: Mapping[str, Mechanism], rest: str, target: float, delta: float, accountant: str
) -> str:
    if not fixed:
        return (
            f"privacy.epsilon={target:g} cannot be met at delta={delta:.3g}, however much noise "
            f"{rest} adds. Raise privacy.epsilon, or lower the shares"
        )
    epsilons = {name: epsilon([m.event], delta, accountant) for name, m in fixed.items()}
    dearest = max(epsilons, key=lambda name: epsilons[name])
    together = epsilon([m.event for m in fixed.values()], delta, accountant)
    if together <= target:
        return (
            f"privacy.epsilon={target:g} cannot be met, however much noise {rest} adds. Of the "
            f"stages with a fixed noise multiplier, {dearest} costs most: ε = "
            f"{epsilons[dearest]:.4g} ({fixed[dearest]}). Raise {dearest}.noise, set it to a share "
            f"such as '5%', or remove {dearest} from run"
        )
    return (
        f"privacy.epsilon={target:g} cannot be met: {dearest} alone costs {epsilons[dearest]:.4g} "
        f"({fixed[dearest]}); all stages with a fixed noise multiplier together cost "
        f"{together:.4g}, which exceeds privacy.epsilon by {together - target:.3g}. Raise "
        f"{dearest}.noise, set it to a share such as '5%', or remove {dearest} from run"
    )


def shares_of_rdp(mechanisms: Mapping[str, Sequence[DpEvent]], delta: float) -> dict[str, float]:
    """Return each stage's share of the RDP, at the best order for the total; shares add up to 1."""
    curves = {name: rdp_curve(events) for name, events in mechanisms.items()}
    total = sum(curves.values(), np.zeros(len(ORDERS)))
    order = ORDERS.index(epsilon_and_order(total, delta)[1])
    return {name: float(curve[order] / (total[order] or 1.0)) for name, curve in curves.items()}
