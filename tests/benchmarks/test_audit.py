"""The audit finds planted bugs and raises no alarm without one; its bounds equal closed forms."""

import functools
from collections.abc import Callable
from io import StringIO

import numpy as np
import pandas as pd
import pytest
import typer
from audit import run
from audit.bounds import (
    clopper_pearson,
    gaussian_bounds,
    guess,
    least_chance,
    one_run_epsilon,
    one_run_p_value,
    refutes_f_dp,
)
from audit.canaries import NOISES, one_run
from audit.repeated import audit
from audit.subjects import CLIP, NoiseOfTheFirstProcess, Subject, planted, subjects
from program import call
from scipy.optimize import linprog
from scipy.stats import binom, norm
from torch import Tensor

from sfumato.features.batch_invariant import place_matters, rows_alone
from sfumato.queries.count import query_count

KNOWN = {subject.name: subject for subject in subjects()}
TESTED = functools.cache(place_matters)
ROWS: dict[tuple[object, ...], Tensor] = {}  # results of `rows_alone`, by its arguments
SURE = 0.99999  # one false alarm in 100 000 audits


def rows_once(function: Callable, images: Tensor, place_matters: bool) -> Tensor:
    """Return a copy of the result of `rows_alone`, which is computed once per set of arguments."""
    key = function, images.shape, images.numpy().tobytes(), place_matters
    if key not in ROWS:
        ROWS[key] = rows_alone(function, images, place_matters)
    return ROWS[key].clone()


def test_the_interval_is_the_exact_one():
    assert clopper_pearson(0, 10, 0.95) == (0.0, pytest.approx(0.30850, abs=1e-5))
    assert clopper_pearson(10, 10, 0.95) == (pytest.approx(0.69150, abs=1e-5), 1.0)
    assert clopper_pearson(3, 20, 0.9) == (
        pytest.approx(0.04217, abs=1e-4),
        pytest.approx(0.34366, abs=1e-4),
    )


def test_the_bounds_of_mu_hold_the_truth_and_close_in_on_it():
    """The rates are computed for a Gaussian with μ = 1.5 and the threshold μ/2, and not sampled, so
    this test has no false alarm.
    """
    widths = []
    for runs in (1000, 10_000, 100_000):
        hits, false = (round(runs * float(norm.cdf(x))) for x in (0.75, -0.75))
        low, high = gaussian_bounds(hits, false, runs, 0.999)
        assert low < 1.5 < high
        widths.append(high - low)
    assert widths[0] > 2 * widths[1] > 4 * widths[2]
    assert (
        gaussian_bounds(1000, 0, 1000, 0.999)[1] == float("inf")
        and gaussian_bounds(0, 1000, 1000, 0.9)[0] < 0
    )


def test_without_delta_the_bound_of_one_run_is_of_coins():
    """With δ = 0, guesses are right at most as often as a coin with probability e^ε/(1 + e^ε).

    With δ > 0, the same guesses prove less.
    """
    assert one_run_p_value(100, 50, 40, 1.0, 0.0) == pytest.approx(
        binom.sf(39, 50, np.e / (1 + np.e))
    )
    assert one_run_p_value(100, 50, 40, 1.0, 1e-3) > one_run_p_value(100, 50, 40, 1.0, 0.0)
    proven = [one_run_epsilon(1000, 200, right, 1e-5, 0.95) for right in (100, 140, 180, 200)]
    assert proven[0] == 0.0 and proven == sorted(proven) and proven[-1] > 3
    at, beyond = (one_run_p_value(1000, 200, 180, proven[2] + more, 1e-5) for more in (0, 0.01))
    assert at <= 0.05 < beyond


def gaussian_curve(mu: float) -> tuple[np.ndarray, np.ndarray]:
    """Return several ε and, for each, the δ of a Gaussian mechanism that is μ-GDP.

    Source: Balle and Wang 2018.
    """
    epsilons = np.arange(0, 12, 0.25)
    return epsilons, norm.cdf(mu / 2 - epsilons / mu) - np.exp(epsilons) * norm.cdf(
        -mu / 2 - epsilons / mu
    )


def most_likely(
    canaries: int, guesses: int, correct: int, epsilons: np.ndarray, deltas: np.ndarray
) -> float:
    """Return the largest probability of at least `correct` right guesses, by a linear program.

    The variables of the program are the probabilities of each number of right guesses. Its
    constraints are r ≤ f̄(w) for each j:

    - r is the expected number of right guesses per canary. Outcomes with fewer than j right guesses
      count as zero;
    - w is the expected number of wrong guesses per canary. Outcomes with fewer than j − 1 right
      guesses count as zero;
    - f̄ is the minimum of the lines e^ε · w + δ and 1 − e^−ε · (1 − δ − w) over all (ε, δ).
    """
    number = np.arange(guesses + 1)
    rows = [np.ones(guesses + 1)]
    limits = [1.0]
    for j in range(1, guesses + 1):
        right = np.where(number >= j, number, 0) / canaries
        wrong = np.where(number >= j - 1, guesses - number, 0) / canaries
        for epsilon, delta in zip(epsilons, deltas, strict=True):
            rows += [right - np.exp(epsilon) * wrong, right - np.exp(-epsilon) * wrong]
            limits += [delta, 1 - np.exp(-epsilon) * (1 - delta)]
    found = linprog(
        -(number >= correct).astype(float), A_ub=np.array(rows), b_ub=limits, bounds=(0, 1)
    )
    return float(-found.fun)


@pytest.mark.parametrize("case", [(12, 12, 10), (12, 12, 12), (20, 8, 7), (40, 10, 10)])
@pytest.mark.parametrize("mu", [0.5, 1.0])
def test_the_f_dp_bound_of_one_run_solves_a_linear_program(mu, case):
    chance = most_likely(*case, *gaussian_curve(mu))
    least = least_chance(*gaussian_curve(mu))
    assert 0.001 < chance < 0.9
    assert refutes_f_dp(*case, least, chance * 1.001) and not refutes_f_dp(
        *case, least, chance * 0.999
    )


@pytest.mark.parametrize("mu", [0.3, 1.0])
def test_the_f_dp_bound_rarely_refutes_a_true_claim(mu):
    """The best guess of an independent Gaussian canary is right with probability Φ(μ/2).

    So the number of right guesses is binomial, and nothing is sampled.
    """
    curve = least_chance(*gaussian_curve(mu))
    refuted = [correct for correct in range(201) if refutes_f_dp(200, 200, correct, curve, 0.05)]
    assert refuted == list(range(refuted[0], 201))
    assert binom.sf(refuted[0] - 1, 200, norm.cdf(mu / 2)) <= 0.05


def test_the_f_dp_bound_proves_more_than_a_gaussian_pair():
    pure = least_chance(np.array([1.0]), np.array([0.0]))
    assert pure(0.3) == pytest.approx(0.3 / np.e) and pure(0.9) == pytest.approx(1 - 0.1 * np.e)
    coins = float(binom.sf(84, 100, np.e / (1 + np.e)))
    assert not refutes_f_dp(100, 100, 85, pure, coins) and refutes_f_dp(
        100, 100, 85, pure, 2 * coins
    )
    curve = gaussian_curve(1.55)
    epsilon = curve[0][28]
    delta = curve[1][28]
    assert epsilon == 7 and delta < 3e-5 and one_run_p_value(1024, 1024, 1017, epsilon, delta) > 0.9
    assert refutes_f_dp(1024, 1024, 1017, least_chance(*curve), 0.025)


def test_guesses_are_the_surest():
    scores = np.array([3.0, -2.0, 0.1, 9.0, -5.0, 0.0])
    inside = np.array([True, False, True, False, False, True])
    assert (
        guess(scores, inside, 4) == 3
        and guess(scores, inside, 2) == 1
        and guess(scores, inside, 6) == 4
    )


@pytest.mark.parametrize("name", KNOWN)
def test_every_release_is_as_noisy_as_claimed_and_no_noisier(name, monkeypatch):
    """The false-alarm rate is 2 in 100 000. With 400 releases and μ = 2, the bounds on μ are about
    2 ± 0.8.

    For each of these releases, `feature_means` and `histogram` would test this machine's kernels
    again, and compute the same rows again. The results never change, so they are computed once.
    """
    for query in ("feature_means", "histogram"):
        monkeypatch.setattr(f"sfumato.queries.{query}.place_matters", TESTED)
        monkeypatch.setattr(f"sfumato.queries.{query}.rows_alone", rows_once)
    found = audit(KNOWN[name], runs=400, confidence=SURE)
    assert not found.alarm and found.low > 0.9 and found.high > 2.0 and found.off_grid == 0


@pytest.mark.parametrize("subject", planted(KNOWN), ids=lambda subject: subject.name)
def test_planted_bugs_are_found(subject):
    assert audit(subject, runs=400, confidence=0.99).alarm


def test_a_release_off_the_grid_is_found():
    """Without a grid, the last bits of a float64 sum would distinguish an empty sum from others."""

    def spend(charge):
        released = query_count(charge, 4)
        if hasattr(charge, "look"):
            charge.look(released + 2.0**-30)
        return released

    found = audit(Subject(name="raw", max_norm=KNOWN["count"].max_norm, spend=spend), runs=100)
    assert found.off_grid == 200 and found.alarm


def test_one_run_finds_missing_noise_and_proves_only_the_truth(monkeypatch):
    """The honest run is tested at a confidence of 99.999 %: one false alarm in 100 000 runs.

    Only every fifth noise multiplier is tried, because each one needs its own privacy curve.
    """
    monkeypatch.setattr("audit.canaries.NOISES", NOISES[::5])
    honest = one_run(3.0, steps=2, confidence=SURE)
    assert not honest.alarm and honest.low <= honest.exact <= 3.0 and 0.5 < honest.right < 0.85
    assert honest.low == max(honest.low_pair, honest.low_curve)
    without = Subject(
        name="none", max_norm=CLIP, spend=lambda charge: None, noise=NoiseOfTheFirstProcess
    )
    found = one_run(3.0, steps=2, subject=without)
    assert found.right > honest.right and found.low_pair > honest.low_pair + 0.5


def test_the_script_fails_if_a_claim_is_refuted(tmp_path, monkeypatch):
    assert run.repeated(400, 0.99, "half the noise", tmp_path) == []  # planted, and found
    row = pd.read_csv(tmp_path / "audit.csv").iloc[0]
    assert row["verdict"] == "planted, found" and row["low"] > 2
    assert (tmp_path / "audit.png").stat().st_size > 1000
    words = [
        "--runs",
        "100",
        "--only",
        "half the noise",
        "--confidence",
        "0.9",
        "--parts",
        "repeated",
    ]
    screen = StringIO()
    script = lambda: typer.run(run.main)  # noqa: E731
    assert call(script, "run.py", *words, "--out", str(tmp_path), screen=screen) == 0
    assert "planted" in screen.getvalue()
    monkeypatch.setattr(run, "repeated", lambda *_: ["count: REFUTED"])
    with pytest.raises(typer.Exit) as end:
        run.main(parts="repeated", out=tmp_path)
    assert end.value.exit_code == 3
