"""The forecast of `stage init`: from public results only, as sure as they agree."""

import re

import pytest

from sfumato.evaluation.verdict import LEVELS, level_of
from sfumato.planning import forecast
from sfumato.planning.forecast import KINDS, advice, fitted, measured_line, measured_runs

@pytest.mark.parametrize("kind", KINDS)
def test_more_units_a_larger_epsilon_and_longer_fits_never_lower_the_forecast(kind):
    line = measured_line()
    parts = [line.at(kind, product, fitted(grown)).learned for product in (10, 1e3, 1e5) for grown in (0, 0.5, 1)]
    assert parts[:3] == sorted(parts[:3]) and parts[2::3] == sorted(parts[2::3])
    for product in (10, 1e3, 1e5):
        one = line.at(kind, product)
        assert 0 < one.low < one.learned < one.high < 1


def test_what_the_advice_asks_for_is_the_next_level():
    line, order = measured_line(), list(LEVELS)
    for units in (30, 300, 3000, 30_000):
        level = level_of(line.at("grey", units).learned)
        said = advice("grey", units, 1.0, "persons")
        assert f"{units:,} persons at ε = 1 behave as {units // 10:,} at ε = 10" in said
        if level == "good":
            assert "would" not in said
            continue
        better = order[order.index(level) - 1]
        found = re.fullmatch(r".*; ([\d,]+) persons, or ε = ([\d.]+), would make it (\w+)", said)
        more, larger = float(found[1].replace(",", "")), float(found[2])
        assert found[3] == better
        for product in (more, larger * units):
            assert level_of(line.at("grey", product).learned) == better


def test_two_of_three_public_sets_come_out_as_the_others_forecast_them():
    """Each set is left out in turn. A set that is the only one of its kind has no forecast then."""
    inside = []
    for run in measured_runs():
        line = measured_line(run["set"])
        if run["kind"] in line.offsets:
            found = line.at(run["kind"], run["product"])
            inside.append(found.low <= run["learned"] <= found.high)
    assert len(inside) >= 8 and sum(inside) >= 2 / 3 * len(inside)
