import functools
import math
from pathlib import Path

import mpmath
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from sfumato.errors import BudgetError
from sfumato.privacy import accountant
from sfumato.privacy.accountant import (
    EXACT,
    LARGEST_PLD,
    ORDERS,
    NoiseRequest,
    calibrate,
    conversion,
    default_delta,
    epsilon,
    epsilon_and_order,
    rdp_curve,
    round_up,
    shares_of_rdp,
)
from sfumato.privacy.events import Mechanism

CONCEPTS = (Path(__file__).resolve().parents[2] / "docs" / "concepts.md").read_text(
    encoding="utf-8"
)
DPDM = []
FETA = [(5, 0.1091, 5)]
FIXTURES = [  # METHODS §1: N, q, T, epsilon, earlier queries (sigma, q, times), sigma of DP-SGD
    (55_000, 1 / 14, 2100, 1, DPDM, 14.551),
    (55_000, 1 / 14, 2100, 10, DPDM, 1.994),
    (55_000, 1 / 14, 2100, 1, FETA, 14.939),
    (55_000, 1 / 14, 2100, 10, FETA, 1.994),
    (55_000, 1 / 14, 2100, 1, [(20, 0.1091, 5), (26.6, 1, 1)], 14.778),
    (55_000, 1 / 14, 2100, 10, [(5, 0.1091, 5), (7.4, 1, 1)], 1.999),
    (45_000, 1 / 11, 1650, 1, [], 16.247),
    (45_000, 1 / 11, 1650, 10, [], 2.205),
    (45_000, 1 / 11, 1650, 1, [(15, 0.1333, 5), (32.6, 1, 1)], 16.459),
    (45_000, 1 / 11, 1650, 10, [(5, 0.1333, 5), (8.2, 1, 1)], 2.211),
]


@pytest.mark.parametrize(("size", "rate", "steps", "target", "queries", "noise"), FIXTURES)
def test_published_settings_come_to_their_epsilon(size, rate, steps, target, queries, noise):
    asks = {
        f"q{i}": NoiseRequest(noise_multiplier=s, sample_rate=q, uses=n)
        for i, (s, q, n) in enumerate(queries)
    }
    earlier = [ask.with_noise(ask.noise_multiplier) for ask in asks.values()]
    whole = [*earlier, Mechanism(noise_multiplier=noise, sample_rate=rate, uses=steps)]
    assert epsilon([m.event for m in whole], default_delta(size)) == pytest.approx(target, abs=0.01)
    solved = calibrate(
        asks | {"dpsgd": NoiseRequest(sample_rate=rate, uses=steps)}, target, default_delta(size)
    )
    assert solved["dpsgd"].noise_multiplier == pytest.approx(noise, rel=3e-3)
    assert epsilon([m.event for m in solved.values()], default_delta(size)) <= target


def test_the_three_conversions_of_one_run():
    event = Mechanism(noise_multiplier=1.5, sample_rate=0.068, uses=2000).event
    assert epsilon([event], 1e-5, "rdp_classic") == pytest.approx(13.83, abs=0.02)
    assert epsilon([event], 1e-5, "rdp") == pytest.approx(12.85, abs=0.02)
    assert epsilon([event], 1e-5, "pld") == pytest.approx(11.93, abs=0.02)
    assert all(conversion(a, 1e-5) < conversion(a, 1e-5, classic=True) for a in ORDERS)


def test_cheap_queries_cost_as_documented():
    for noise, cost in ((50, 0.075), (100, 0.036)):
        assert epsilon([GaussianDpEvent(noise)], default_delta(55_000)) == pytest.approx(
            cost, abs=0.001
        )


mechanisms = st.builds(
    Mechanism,
    noise_multiplier=st.floats(0.6, 30),
    sample_rate=st.one_of(st.just(1.0), st.floats(0.005, 0.5)),
    uses=st.integers(1, 400),
)


@settings(max_examples=6)
@given(st.lists(mechanisms, min_size=1, max_size=3), st.sampled_from([1e-4, 1e-5, 1e-6]))
def test_pld_is_never_worse_than_rdp(composition, delta):
    events = [m.event for m in composition]
    rdp = epsilon(events, delta)
    if 0.05 <= rdp <= 60:
        assert epsilon(events, delta, "pld") <= rdp * 1.01 + 2e-3


@pytest.mark.parametrize("rate", [0.01, 1 / 14, 0.5, 1.0])
@pytest.mark.parametrize("noise", [0.4, 0.8, 2.0, 14.5])
def test_opacus_agrees(noise, rate):
    """At integer orders, both libraries compute the same value.

    At other orders, dp-accounting computes an upper bound, never below the value of Opacus.
    """
    from opacus.accountants.analysis.rdp import compute_rdp

    ours = rdp_curve([Mechanism(noise_multiplier=noise, sample_rate=rate).event])
    whole = np.array([order == int(order) for order in ORDERS])
    for i, order in enumerate(ORDERS):
        theirs = compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=[order])
        # Opacus drops the orders that it cannot compute
        if len(theirs) == 1 and np.isfinite(theirs[0]):
            assert ours[i] >= theirs[0] * (1 - 1e-6)
            assert not whole[i] or ours[i] == pytest.approx(theirs[0], rel=1e-6)


def test_order_that_cannot_be_computed_is_never_free():
    curve = rdp_curve([Mechanism(noise_multiplier=0.2, sample_rate=0.3).event])
    assert (curve > 0).all()
    assert epsilon([Mechanism(noise_multiplier=0.06, sample_rate=0.9, uses=50).event], 1e-5) > 100


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_an_order_without_a_number_never_lowers_epsilon(monkeypatch, value):
    """The library may fail at the best order. Then another order must be used, with a larger ε."""
    event = Mechanism(noise_multiplier=2.0).event
    whole, best = epsilon_and_order(rdp_curve([event]), 1e-5)
    monkeypatch.setattr(accountant, "_computed_curve", accountant._computed_curve.__wrapped__)

    class Failing(RdpAccountant):
        def compose(self, *given):
            super().compose(*given)
            self._rdp = np.where(np.array(ORDERS) == best, value, self._rdp)

    monkeypatch.setattr("dp_accounting.rdp.RdpAccountant", Failing)
    spent, order = epsilon_and_order(rdp_curve([event]), 1e-5)
    assert order != best and whole < spent < 1.01 * whole


def test_epsilon_of_a_gaussian_is_near_the_exact_one():
    # Balle & Wang 2018: delta(epsilon) of a Gaussian, in closed form
    def delta_of(eps, noise):
        phi = lambda x: 0.5 * math.erfc(-x / math.sqrt(2))  # noqa: E731
        return phi(1 / (2 * noise) - eps * noise) - math.exp(eps) * phi(
            -1 / (2 * noise) - eps * noise
        )

    for noise in (0.8, 2.0, 10.0):
        for name, slack in (("rdp", 1.25), ("pld", 1.01)):
            claimed = epsilon([GaussianDpEvent(noise)], 1e-5, name)
            assert delta_of(claimed, noise) <= 1e-5 * 1.0001
            assert delta_of(claimed / slack, noise) > 1e-5


SHARES = {
    "count": NoiseRequest(share=0.02),
    "central": NoiseRequest(share=0.05, sample_rate=0.1, uses=5),
    "finetune": NoiseRequest(sample_rate=0.07, uses=200),
}


@functools.cache
def calibrated_shares(target: float, accountant: str) -> dict[str, Mechanism]:
    return calibrate(SHARES, target, default_delta(60_000), accountant)


@pytest.mark.parametrize(("target", "accountant"), [(1.0, "rdp"), (10.0, "rdp"), (1.0, "pld")])
def test_shares_come_out_as_asked(target, accountant):
    delta = default_delta(60_000)
    solved = calibrated_shares(target, accountant)
    assert epsilon([m.event for m in solved.values()], delta, accountant) <= target
    if accountant == "rdp":
        found = shares_of_rdp({name: [m.event] for name, m in solved.items()} | {"none": []}, delta)
        assert sum(found.values()) == pytest.approx(1) and found["none"] == 0
        for name, ask in SHARES.items():
            if ask.share:
                assert found[name] == pytest.approx(ask.share, abs=0.01)


@pytest.mark.parametrize("target", [1.0, 10.0])
def test_a_share_keeps_its_noise_whatever_the_other_stages_do(target):
    """If the noise depended on other stages, a change of DP-SGD's settings would make every query
    spend again.
    """
    delta = default_delta(1500)
    seen = []
    for uses, rate, more in (
        (20, 0.33, {}),
        (30, 0.33, {}),
        (200, 0.01, {"histogram": NoiseRequest(share=0.3)}),
    ):
        asks = {
            "count": NoiseRequest(share=0.02),
            "central": NoiseRequest(share=0.03, sample_rate=0.4, uses=4),
            **more,
        }
        solved = calibrate(
            asks | {"finetune": NoiseRequest(sample_rate=rate, uses=uses)}, target, delta
        )
        assert epsilon([m.event for m in solved.values()], delta) <= target
        seen.append((solved["count"], solved["central"]))
    assert len(set(seen)) == 1


@pytest.mark.parametrize("share", [0.02, 0.3])
@pytest.mark.parametrize("target", [1.0, 10.0])
def test_a_share_of_one_release_is_that_part_of_a_gaussian(target, share):
    delta = default_delta(60_000)
    whole = calibrate({"all": NoiseRequest()}, target, delta)["all"].noise_multiplier
    asks = {"a": NoiseRequest(share=share), "finetune": NoiseRequest(sample_rate=0.07, uses=200)}
    assert calibrate(asks, target, delta)["a"].noise_multiplier == pytest.approx(
        whole / math.sqrt(share), rel=2e-3
    )


# METHODS §7: true share of the selection in %, by ε and noise multiplier, at N = 162 770, T = 1000,
# q = 4096/N. Table 10 of DP-SAPF has the same layout.
SALIENCY_SHARES = {
    1: {5: 87.0, 10: 21.8, 20: 5.4, 25: 3.5},
    5: {5: 4.6, 10: 1.15, 20: 0.29, 25: 0.18},
    10: {5: 1.4, 10: 0.36, 20: 0.09, 25: 0.06},
}


@pytest.mark.parametrize("target", SALIENCY_SHARES)
def test_saliency_takes_the_honest_share_of_the_budget(target):
    size = 162_770
    delta = default_delta(162_770)
    for noise, percent in SALIENCY_SHARES[target].items():
        finetune = NoiseRequest(sample_rate=4096 / size, uses=1000)
        found = calibrate(
            {"saliency": NoiseRequest(noise_multiplier=noise), "finetune": finetune}, target, delta
        )
        shares = shares_of_rdp({name: [m.event] for name, m in found.items()}, delta)
        assert 100 * shares["saliency"] == pytest.approx(percent, abs=0.5)


def test_rest_after_shares_meets_a_tight_budget():
    central = NoiseRequest(noise_multiplier=5, sample_rate=0.1, uses=5)
    asks = {
        "count": NoiseRequest(noise_multiplier=500),
        "central": central,
        "finetune": NoiseRequest(),
    }
    with pytest.raises(BudgetError, match=r"central alone costs .* Raise central\.noise"):
        calibrate(asks, 0.01, 1e-6)


def test_fixed_noise_within_the_budget_may_leave_nothing():
    asks = {
        "count": NoiseRequest(noise_multiplier=500),
        "central": NoiseRequest(noise_multiplier=6),
        "teacher": NoiseRequest(share=0.6),
        "finetune": NoiseRequest(),
    }
    message = r"however much noise finetune adds\. Of the stages .* central costs most: ε = 0\."
    with pytest.raises(BudgetError, match=message):
        calibrate(asks, 0.8, 1e-5)


@pytest.mark.parametrize(
    "asks",
    [
        {"a": NoiseRequest(noise_multiplier=1)},
        {"a": NoiseRequest(), "b": NoiseRequest()},
        {"a": NoiseRequest(share=0.6), "b": NoiseRequest(share=0.5), "c": NoiseRequest()},
    ],
)
def test_budgets_without_one_rest_are_refused(asks):
    with pytest.raises(BudgetError):
        calibrate(asks, 1, 1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"adjacency": "none"}, "adjacency='none' is unknown"),
        ({"accountant": "none"}, "accountant='none' is unknown"),
        ({"delta": 0.0}, "delta=0.0 must lie in"),
        ({"delta": 1.0}, "delta=1.0 must lie in"),
    ],
)
def test_an_epsilon_without_a_meaning_is_refused(change, words):
    options = {"delta": 1e-5, "accountant": "rdp"} | change
    with pytest.raises(BudgetError, match=words):
        epsilon([Mechanism(noise_multiplier=1.0).event], **options)


@pytest.mark.parametrize(
    ("asks", "words"),
    [
        ({"a": NoiseRequest()}, "however much noise a adds"),
        ({"a": NoiseRequest(share=0.5), "b": NoiseRequest()}, "raise privacy.epsilon"),
    ],
)
def test_a_target_that_no_noise_meets_is_refused(asks, words):
    with pytest.raises(BudgetError, match=words):
        calibrate(asks, 1e-9, 1e-12)


@given(st.floats(1e-3, 1e6))
def test_rounding_never_lowers_the_noise(value):
    assert value * (1 - 1e-11) <= round_up(value) <= value * 1.0011


@pytest.mark.parametrize("rate", [0.5, 0.499])
def test_a_share_at_an_infinite_order_takes_another_order(rate):
    """At a rate of one half, the curve is infinite at most of the orders below 4, however much
    noise is added.
    """
    asks = {
        "central": NoiseRequest(sample_rate=rate, uses=4, share=0.03),
        "finetune": NoiseRequest(sample_rate=0.33, uses=20),
    }
    for target in (1.0, 10.0):
        solved = calibrate(asks, target, 1e-4)
        spent = epsilon([mechanism.event for mechanism in solved.values()], 1e-4)
        assert 0.8 * target < spent <= target


@pytest.mark.parametrize(("target", "delta"), [(0.78, 1e-5), (0.05, 0.1)])
def test_pld_searches_beyond_the_bound_of_renyi(monkeypatch, target, delta):
    """By Rényi's bound, the first budget cannot be met, and the second one would need more than
    twice as much noise.

    The test uses the exact ε of Gaussians, because their privacy-loss distribution is slower.
    """

    def exact(events, delta, adjacency):
        return epsilon(events, delta, EXACT, adjacency)

    monkeypatch.setattr(accountant, "_pld_epsilon", exact)
    asks = {"a": NoiseRequest(noise_multiplier=5.0), "rest": NoiseRequest()}
    solved = calibrate(asks, target, delta, "pld")
    found = epsilon([mechanism.event for mechanism in solved.values()], delta, EXACT)
    assert 0.998 * target < found <= target, solved


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_what_inputs_bring_along_is_part_of_the_budget(accountant):
    before = [Mechanism(noise_multiplier=24.0).event]
    asks = {
        "count": NoiseRequest(noise_multiplier=32.0),
        "finetune": NoiseRequest(sample_rate=0.1, uses=20),
    }
    beside = calibrate(asks, 0.5, 1e-5, accountant, before=before)
    together = epsilon([*before, *(m.event for m in beside.values())], 1e-5, accountant)
    assert 0.487 < together <= 0.5


# --- exact composition ----------------------------------------------------------------------------


def delta_in_sixty_digits(epsilon: mpmath.mpf, mu: mpmath.mpf) -> mpmath.mpf:
    """Compute δ by Balle & Wang 2018, theorem 8, for a Gaussian with one image moving the sum by
    `mu` standard deviations.
    """
    first = mpmath.ncdf(mu / 2 - epsilon / mu)
    second = mpmath.ncdf(-mu / 2 - epsilon / mu)
    return first - mpmath.exp(epsilon) * second


# Sets of (noise multiplier, uses)
GAUSSIANS = [
    [(4.139, 1)],
    [(30.0, 60), (7.557, 1), (9.255, 1), (58.54, 1)],
    [(0.2, 1)],  # little noise
    [(0.9, 2), (1e5, 10**9)],  # many uses
    [(1e3, 1)],  # much noise
    [(1e7, 1)],
    [(1e12, 3)],  # from here on, differences in the formula cancel in float64
    [(1e100, 1)],
]


@pytest.mark.parametrize("parts", GAUSSIANS)
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 4e-12])
def test_exact_is_the_closed_form_of_all_gaussians(parts, delta):
    events = [Mechanism(noise_multiplier=noise, uses=uses).event for noise, uses in parts]
    claimed = epsilon(events, delta, EXACT)
    with mpmath.workdps(60):
        mu = mpmath.sqrt(sum(uses / mpmath.mpf(noise) ** 2 for noise, uses in parts))
        assert delta_in_sixty_digits(mpmath.mpf(claimed), mu) <= delta
        less = mpmath.mpf(claimed) - mpmath.mpf(1e-10)
        assert less < 0 or delta_in_sixty_digits(less, mu) > delta
    assert claimed <= epsilon(events, delta) + 1e-10


@pytest.mark.parametrize("accountant", ["pld", EXACT])
def test_a_delta_below_the_distribution_s_gives_renyis_bound(accountant):
    drawn = [Mechanism(noise_multiplier=3.0, sample_rate=0.2, uses=20).event]
    assert math.isfinite(epsilon(drawn, 1e-16))
    assert epsilon(drawn, 1e-16, accountant) == epsilon(drawn, 1e-16)


def test_beyond_all_use_exact_is_renyi_s_bound():
    loud = [Mechanism(noise_multiplier=1e-50).event]
    assert epsilon(loud, 1e-5, EXACT) == epsilon(loud, 1e-5) > LARGEST_PLD


over_all = st.builds(Mechanism, noise_multiplier=st.floats(0.6, 300), uses=st.integers(1, 400))


@settings(max_examples=8)
@given(st.lists(over_all, min_size=1, max_size=3), st.sampled_from([1e-4, 1e-5, 1e-6]))
def test_upper_bounds_are_never_below_the_exact_epsilon(composition, delta):
    events = [m.event for m in composition]
    rdp = epsilon(events, delta)
    if 0.05 <= rdp <= 60:
        pld, exact = (epsilon(events, delta, name) for name in ("pld", EXACT))
        assert exact <= pld + 1e-8 and exact <= rdp
        assert pld <= exact * 1.001 + 1e-3


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "zero-out-one"])
def test_exact_with_a_subsampled_query_is_the_distribution(adjacency):
    drawn = Mechanism(noise_multiplier=2.0, sample_rate=0.2, uses=20).event
    whole = GaussianDpEvent(1.5)
    both = epsilon([drawn, whole], 1e-5, EXACT, adjacency)
    assert both == epsilon([whole, drawn], 1e-5, "pld", adjacency)
    assert both > 1.05 * max(epsilon([event], 1e-5, EXACT, adjacency) for event in (drawn, whole))


# METHODS §15: the noise of one release over all images, by N and ε
NOISE = {
    (60_000, 1): 4.139,
    (60_000, 3): 1.518,
    (60_000, 10): 0.534,
    (5700, 1): 3.570,
    (5700, 10): 0.4866,
}


@pytest.mark.parametrize(("size", "target"), NOISE)
def test_exact_noise_is_the_least_that_meets_the_budget(size, target):
    delta = default_delta(size)
    noise = calibrate({"all": NoiseRequest()}, target, delta, EXACT)["all"].noise_multiplier
    assert noise == pytest.approx(NOISE[size, target], rel=5e-4)
    assert (
        epsilon([GaussianDpEvent(noise)], delta, EXACT)
        <= target
        < epsilon([GaussianDpEvent(noise * 0.999)], delta, EXACT)
    )
    assert (
        1.05
        < calibrate({"all": NoiseRequest()}, target, delta)["all"].noise_multiplier / noise
        < 1.10
    )


@pytest.mark.parametrize("target", [0.1, 1.0, 10.0, 60.0])
def test_exact_shares_are_parts_of_mu_squared(target):
    delta = default_delta(60_000)
    whole = calibrate({"all": NoiseRequest()}, target, delta, EXACT)["all"].noise_multiplier
    asks = {
        "count": NoiseRequest(share=0.005),
        "frequency": NoiseRequest(share=0.3),
        "teacher": NoiseRequest(uses=60),
    }
    solved = calibrate(asks, target, delta, EXACT)
    assert 0.999 * target < epsilon([m.event for m in solved.values()], delta, EXACT) <= target
    for name, share in (("count", 0.005), ("frequency", 0.3), ("teacher", 0.695 / 60)):
        assert solved[name].noise_multiplier == pytest.approx(whole / math.sqrt(share), rel=2e-3), (
            name
        )


def test_with_exact_the_rest_is_little_where_renyi_leaves_none():
    delta = default_delta(5700)
    asks = {"all": NoiseRequest(share=0.95), "rest": NoiseRequest()}
    solved = calibrate(asks, 1.0, delta, EXACT)
    events = [m.event for m in solved.values()]
    assert 0.999 < epsilon(events, delta, EXACT) <= 1.0 < epsilon(events, delta)


def test_exact_meets_a_budget_with_inherited_records():
    delta = default_delta(60_000)
    before = [GaussianDpEvent(24.0)]
    asks = {"count": NoiseRequest(share=0.02), "finetune": NoiseRequest(sample_rate=0.3, uses=20)}
    solved = calibrate(asks, 0.5, delta, EXACT, before=before)
    events = [*before, *(m.event for m in solved.values())]
    assert 0.499 < epsilon(events, delta, EXACT) <= 0.5 < epsilon(events, delta)
    whole = calibrate({"all": NoiseRequest()}, 0.5, delta, EXACT)["all"].noise_multiplier
    assert solved["count"].noise_multiplier == pytest.approx(whole / math.sqrt(0.02), rel=2e-3)


def test_exact_counts_what_inputs_bring_along():
    before = [Mechanism(noise_multiplier=24.0).event]
    beside = calibrate(
        {"count": NoiseRequest(noise_multiplier=32.0), "teacher": NoiseRequest()},
        0.5,
        1e-5,
        EXACT,
        before=before,
    )
    assert 0.499 < epsilon([*before, *(m.event for m in beside.values())], 1e-5, EXACT) <= 0.5


def test_older_accountants_give_the_noise_of_before():
    """With other noise, an existing project would spend again."""
    for name, noise in (("rdp", [31.45, 4.695, 4.755]), ("pld", [31.45, 4.695, 4.403])):
        solved = calibrated_shares(1.0, name)
        assert [m.noise_multiplier for m in solved.values()] == noise


def order_of(limit: float, delta: float) -> float:
    """Return the best order for a Gaussian over all images that just meets the limit."""
    return max(ORDERS, key=lambda order: (limit - conversion(order, delta)) / order)


@given(
    sigmas=st.lists(st.floats(0.5, 100), min_size=1, max_size=8),
    limit=st.floats(0.1, 20),
    delta=st.sampled_from([1e-3, 1e-5, 1e-9]),
)
@settings(max_examples=60)
def test_of_gaussians_over_all_images_the_limit_fixes_the_order(sigmas, limit, delta):
    """For Gaussians over all images, the limit determines the best order. So a limit on the
    smallest ε over all orders is a privacy filter at one order.

    No outcome of a query changes this order.
    """
    events = [GaussianDpEvent(sigma) for sigma in sigmas]
    order = order_of(limit, delta)
    at_it = rdp_curve(events, (order,))[0] + conversion(order, delta)
    assert abs(at_it - limit) < 1e-9 or (epsilon(events, delta, "rdp") <= limit) == (at_it <= limit)


def test_the_order_moves_if_queries_sample():
    """If queries draw samples, the best order depends on the charges. So a proof for one order does
    not cover the smallest ε over all orders.
    """
    delta = 1e-5
    many = [
        Mechanism(noise_multiplier=1.0, sample_rate=0.01, uses=uses).event for uses in (100, 10_000)
    ]
    orders = {epsilon_and_order(rdp_curve([event]), delta)[1] for event in many}
    limit = epsilon([many[1]], delta, "rdp")
    assert len(orders | {order_of(limit, delta)}) > 1
    assert f"over {len(ORDERS)} orders" in CONCEPTS and f"{len(ORDERS)} · δ" in CONCEPTS
    assert f"1/{len(ORDERS)} of the δ" in CONCEPTS and "holds for any choice" not in CONCEPTS
