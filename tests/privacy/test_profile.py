"""Compare the bounds on an attacker with the closed form of one Gaussian."""

import math
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from sfumato.errors import BudgetError
from sfumato.privacy.accountant import NoiseRequest, calibrate, epsilon, rdp_curve
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, ZERO_OUT_ONE, Mechanism
from sfumato.privacy.profile import (
    EPSILONS,
    LOW_ORDERS,
    Profile,
    advantage_of_rdp,
    best_guess,
    bound_text,
    deltas_of_rdp,
    membership_advantage,
    noise_for_guess,
    privacy_profile,
    true_positive_rate,
)

NORMAL = NormalDist()
SIGMAS = (0.5, 1.0, 3.0, 20.0)


@lru_cache
def profile_of(*mechanisms: Mechanism, **more) -> Profile:
    return privacy_profile([m.event for m in mechanisms], **more)


def renyi_profile(*mechanisms: Mechanism) -> Profile:
    curve = rdp_curve(one.event for one in mechanisms)
    return Profile(EPSILONS, deltas_of_rdp(curve), advantage_of_rdp(curve))


def gaussian(sigma: float) -> Mechanism:
    return Mechanism(noise_multiplier=sigma)


def exact_advantage(sigma: float) -> float:
    return 2 * NORMAL.cdf(1 / (2 * sigma)) - 1


def exact_rate(sigma: float, alpha: float) -> float:
    return NORMAL.cdf(NORMAL.inv_cdf(alpha) + 1 / sigma)


@pytest.mark.parametrize("adjacency", [ADD_OR_REMOVE_ONE, ZERO_OUT_ONE])
@pytest.mark.parametrize("sigma", SIGMAS)
def test_one_gaussian_has_the_closed_forms_hit_rates(sigma, adjacency):
    profile = profile_of(gaussian(sigma), adjacency=adjacency)
    assert (
        exact_advantage(sigma) - 1e-9
        <= membership_advantage(profile)
        <= exact_advantage(sigma) + 2e-4
    )
    for alpha in (0.001, 0.01, 0.1, 0.5):
        found = true_positive_rate(profile, alpha)
        assert exact_rate(sigma, alpha) - 1e-9 <= found <= exact_rate(sigma, alpha) + 1e-3


@pytest.mark.parametrize("sigma", SIGMAS)
def test_many_gaussians_are_one_of_less_noise(sigma):
    many = profile_of(Mechanism(noise_multiplier=sigma * 3, uses=9))
    one = profile_of(gaussian(sigma))
    assert np.allclose(many.deltas, one.deltas, atol=1e-3)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_renyi_curve_gives_a_useful_upper_bound(sigma):
    known = renyi_profile(gaussian(sigma))
    assert exact_advantage(sigma) <= membership_advantage(known) < 1
    assert exact_rate(sigma, 0.01) <= true_positive_rate(known) < 1
    # Pinsker's bound is √(π/2) ≈ 1.25 times as large, and the lowest order, 1.05, adds 3 %
    assert membership_advantage(known) < 1.4 * exact_advantage(sigma)


def test_the_profile_goes_through_the_epsilon_of_the_ledger():
    mechanisms = [gaussian(3.0), Mechanism(noise_multiplier=1.8, sample_rate=0.3, uses=20)]
    for build, accountant in ((profile_of, "pld"), (renyi_profile, "rdp")):
        profile = build(*mechanisms)
        spent = epsilon([m.event for m in mechanisms], 1e-5, accountant)
        assert math.exp(
            np.interp(spent, profile.epsilons, np.log(profile.deltas))
        ) == pytest.approx(1e-5, rel=0.02)


def test_the_exact_subsampled_test_stays_below_the_bound():
    """With one use, the best test is a threshold on the released sum.

    So its hit rate is known, whether the test claims "used" or "not used".
    """
    q = 0.3
    sigma = 0.7
    alpha = 0.01
    bound = true_positive_rate(profile_of(Mechanism(noise_multiplier=sigma, sample_rate=q)), alpha)
    threshold = NORMAL.inv_cdf(1 - alpha) * sigma
    hits = (1 - q) * alpha + q * (1 - NORMAL.cdf((threshold - 1) / sigma))
    assert hits - 1e-9 <= bound

    # Share of sums with the image that are below x, for which the test claims "not used"
    def tail(x: float) -> float:
        return (1 - q) * NORMAL.cdf(x / sigma) + q * NORMAL.cdf((x - 1) / sigma)

    low = -10.0
    high = 10.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) < alpha else (low, middle)
    other = NORMAL.cdf(low / sigma)
    assert other - 1e-9 <= bound <= max(hits, other) + 0.01


@pytest.mark.parametrize(("sigma", "rate", "uses"), [(0.8, 1.0, 1), (6.0, 1.0, 20), (1.5, 0.2, 5)])
def test_less_noise_or_more_uses_never_help_privacy(sigma, rate, uses):
    start = Mechanism(noise_multiplier=sigma, sample_rate=rate, uses=uses)
    profile = renyi_profile(start)
    for worse in (
        {"noise_multiplier": sigma / 1.3},
        {"uses": uses + 3},
        {"sample_rate": min(1.0, rate * 1.3)},
    ):
        other = renyi_profile(replace(start, **worse))
        assert (other.deltas >= profile.deltas - 1e-12).all()
        assert membership_advantage(other) >= membership_advantage(profile) - 1e-12
        assert true_positive_rate(other) >= true_positive_rate(profile) - 1e-12


def test_hit_rates_rise_with_false_alarms():
    for profile in (profile_of(gaussian(0.7)), renyi_profile(gaussian(0.7))):
        alphas = np.linspace(0, 1, 41)
        rates = [true_positive_rate(profile, alpha) for alpha in alphas]
        assert rates == sorted(rates) and all(alphas <= rates) and rates[-1] <= 1
        assert (
            (np.diff(profile.deltas) <= 0).all()
            and profile.deltas.min() >= 0
            and profile.deltas.max() <= 1
        )


def test_nothing_released_tells_nothing_and_no_noise_tells_all():
    assert (
        membership_advantage(privacy_profile([])) == 0
        and true_positive_rate(privacy_profile([])) == 0.01
    )
    open_book = renyi_profile(gaussian(1e-3))
    assert membership_advantage(open_book) == 1 and true_positive_rate(open_book) == pytest.approx(
        1
    )


def test_unknown_adjacencies_and_rates_are_refused():
    with pytest.raises(BudgetError, match="adjacency"):
        privacy_profile([gaussian(1).event], adjacency="none")
    with pytest.raises(BudgetError, match="false_positive_rate"):
        true_positive_rate(profile_of(gaussian(1)), 1.5)


def test_a_cost_is_never_understated_in_print():
    assert [bound_text(value) for value in (0.0, math.inf, 1.00001)] == ["0", "∞", "1.001"]


def test_the_quick_guess_is_a_bound_near_the_exact_one():
    mechanisms = (
        Mechanism(noise_multiplier=2.0),
        Mechanism(noise_multiplier=1.5, sample_rate=0.2, uses=30),
    )
    exact = (1 + membership_advantage(privacy_profile([one.event for one in mechanisms]))) / 2
    assert exact <= best_guess(mechanisms) <= exact + 0.001
    assert best_guess((Mechanism(noise_multiplier=1.0),)) == pytest.approx(
        NORMAL.cdf(0.5), abs=1e-4
    )
    factor = noise_for_guess(mechanisms, (exact + 0.5) / 2)
    assert (
        best_guess(mechanisms, noise=factor)
        <= (exact + 0.5) / 2
        < best_guess(mechanisms, noise=0.98 * factor)
    )


@pytest.mark.parametrize("rate", [1.0, 0.9, 0.3, 0.01])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 100.0])
def test_the_low_orders_bound_the_advantage_as_all_do(sigma, rate):
    event = Mechanism(noise_multiplier=sigma, sample_rate=rate, uses=3).event
    assert advantage_of_rdp(rdp_curve([event], LOW_ORDERS)) == advantage_of_rdp(rdp_curve([event]))


def test_what_a_report_asks_of_one_composition_is_computed_once(monkeypatch):
    """The order of the events does not matter, and each adjacency has its own result."""
    composed = []
    compose = PLDAccountant.compose
    monkeypatch.setattr(
        PLDAccountant, "compose", lambda own, event: composed.append(event) or compose(own, event)
    )
    events = [gaussian(7.25).event, gaussian(8.5).event]
    for _ in range(2):
        privacy_profile(events)
        epsilon(reversed(events), 1e-5, "pld")
    assert len(composed) == 1
    epsilon(events, 1e-5, "pld", ZERO_OUT_ONE)
    assert len(composed) == 2


DOCS = Path(__file__).parents[2] / "docs"


def one_gaussian(target: float) -> Mechanism:
    """Return the mechanism with the least noise at this ε, as in projects of `stage init`."""
    (one,) = calibrate({"frequency": NoiseRequest()}, target, 1e-5, accountant="exact").values()
    return one


def test_the_table_of_risks_in_the_docs_is_one_gaussian():
    page = (DOCS / "howto.md").read_text()
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) in 100 \|$", page, re.MULTILINE)
    assert len(rows) >= 5
    for target, guess, hits in rows:
        one = one_gaussian(float(target))
        assert float(guess) == pytest.approx(100 * best_guess((one,)), abs=0.06)
        rate = true_positive_rate(privacy_profile([one.event]))
        assert float(hits) == pytest.approx(100 * rate, abs=0.06)


def test_the_cost_of_a_second_release_is_two_gaussians():
    page = (DOCS / "data-protection.md").read_text()
    cells = r"\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) % \|"
    rows = re.findall(f"^{cells}$", page, re.MULTILINE)
    assert len(rows) >= 5
    for target, both, after_one, after_both in rows:
        one = one_gaussian(float(target))
        total = epsilon([one.event, one.event], 1e-5, "exact")
        assert total <= float(both) < total + 0.011
        assert float(after_one) == pytest.approx(100 * best_guess((one,)), abs=0.06)
        assert float(after_both) == pytest.approx(100 * best_guess((one, one)), abs=0.06)
