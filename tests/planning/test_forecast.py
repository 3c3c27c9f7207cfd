"""The forecast of `stage init` uses only public results. Its range shows how well they agree."""

import re

import forecast as fit
import numpy as np
import pytest
from scipy.special import logit

from sfumato.evaluation.verdict import VERDICT_LEVELS, level_of
from sfumato.planning.forecast import LINE, advice, curve, expected_part, forecast, size_factor

KINDS = tuple(LINE["offsets"])


@pytest.mark.parametrize("kind", KINDS)
def test_more_units_epsilon_or_fit_never_lower_the_forecast(kind):
    lengths = [size_factor(grown, 64, 64, 1000) for grown in (0, 0.5, 1)]
    parts = [expected_part(kind, product, left) for product in (10, 1e3, 1e5) for left in lengths]
    assert lengths[2] == 1
    assert parts[:3] == sorted(parts[:3]) and parts[2::3] == sorted(parts[2::3])
    for product in (10, 1e3, 1e5):
        low, part, high = (expected_part(kind, product, spreads=spreads) for spreads in (-1, 0, 1))
        assert 0 < low < part < high < 1
        shown = f"{level_of(part)}, {100 * part:.0f} % ({100 * low:.0f} to {100 * high:.0f})"
        assert forecast(kind, 1000, product / 1000, 1) == shown


def test_the_range_is_wider_for_a_few_hundred_persons():
    """In a run with 127 persons, the forecast was 58 % and the result was 12 %."""

    def ends(units):
        found = re.search(r"(\d+) % \((\d+) to (\d+)\)", forecast("grey", units, 1000 / units, 1))
        return [logit(int(each) / 100) for each in found.groups()]

    middle, *whole = ends(2000)
    assert ends(1000) == [middle, *whole]
    again, *wide = ends(250)
    assert again == middle
    for far, near in zip(wide, whole, strict=True):
        assert (far - middle) / (near - middle) == pytest.approx(2, rel=0.1)


def test_smaller_images_teach_less_only_with_many_units():
    sides = [8, 16, 24, 28, 32, 48, 64, 128, 224]
    many, few = (
        [size_factor(1.0, side, 224, product) for side in sides] for product in (50_000, 400)
    )
    assert many == sorted(many) and few == sorted(few, reverse=True) and many[-1] == few[-1] == 1
    assert all(size_factor(1.0, side, side, 400) == 1 for side in sides)
    assert (
        size_factor(1.0, 64, 224, 400)
        == size_factor(1.0, 64, 128, 400)
        == size_factor(1.0, 64, 9000, 400)
    )
    for product in (10, 100, 400, 1000, 3000):  # the result is below 1 even if the product is small
        assert all(
            expected_part(kind, product, size_factor(1.0, 8, 224, product), 1.0) < 1
            for kind in KINDS
        )
    # Between few and many units, there is no jump
    assert all(0.95 < size_factor(1.0, side, 224, 2900) < 1.05 for side in sides)


@pytest.mark.parametrize("factor", [1.0, 0.7])
@pytest.mark.parametrize("units", [30, 300, 3000, 30_000])
def test_what_the_advice_asks_for_is_the_next_level(units, factor):
    order = list(VERDICT_LEVELS)
    level = level_of(expected_part("grey", units, factor))
    said = advice("grey", units, 1.0, "persons", factor)
    assert f"{units:,} persons at ε = 1 are as useful as {units // 10:,} at ε = 10" in said
    assert "as useful as 300 at ε = 1" in advice("grey", 30, 10.0, "persons", factor)
    if level == "good" or (level == "fair" and factor < 0.9):
        assert "forecast would be" not in said, "no number of persons reaches this level"
        return
    found = re.fullmatch(
        r".*\. With ([\d,]+) persons(?:, or ε = ([\d.]+))?, the forecast would be (\w+)", said
    )
    assert found[3] == order[order.index(level) - 1]
    asked = [float(found[1].replace(",", ""))]
    if found[2]:
        asked.append(float(found[2]) * units)
    assert {level_of(expected_part("grey", product, factor)) for product in asked} == {found[3]}
    assert ("or ε = " in said) == (asked[0] / units <= 10), "a weak guarantee is never recommended"


def test_the_curve_fits_the_public_results():
    """If this fails, run `python benchmarks/forecast.py`, which writes the fitted curve to
    sfumato/planning/forecast.yaml.
    """
    assert fit.fitted(fit.runs()) == LINE


def test_seven_of_eight_left_out_sets_come_out_within_the_range():
    """Each run is forecast from the runs of other sets. 7 of 8 runs must be within the range. Of
    the sets of 100 to 2 000 units, 7 of 8 must have all their runs within the range.
    """
    found = fit.left_out(fit.runs())
    within = found.error <= LINE["spread"]
    assert len(found) >= 20 and within.mean() >= 7 / 8
    small = within[found.units.between(100, 2000)].groupby(found.set).all()
    assert len(small) >= 8 and small.mean() >= 7 / 8
    order = list(VERDICT_LEVELS)
    away = [
        order.index(one) - order.index(other)
        for one, other in zip(found.expected, found.level, strict=True)
    ]
    assert np.mean(np.abs(away) > 1) < 1 / 10, "hardly any set is two levels away"


@pytest.mark.parametrize("kind", KINDS)
def test_the_curve_rises_within_its_band_around_public_runs(kind):
    found = curve(kind, 500)
    parts = [part for _, part in found["line"]]
    assert parts == sorted(parts) and found["here"] == (
        pytest.approx(2.699, abs=1e-3),
        expected_part(kind, 500),
    )
    high = found["band"][: len(parts)]
    low = found["band"][: len(parts) - 1 : -1]
    for (x, part), (left, above), (right, below) in zip(found["line"], high, low, strict=True):
        assert x == left == right and below < part < above
    names = [name for name, _ in found["runs"]]
    assert names == [run["name"] for run in LINE["runs"] if run["kind"] == kind] != []
    assert all(1.5 < x < 6.5 and 0 < part < 1 for _, (x, part) in found["runs"])
