"""What a release will probably be good for, said before anything is spent: from results on public images only.

The noise weighs on 500 persons at ε = 1 as it does on 50 at ε = 10: their product decides. The line that fits the
table `measured.yaml` best gives what a classifier learns, as a part of what there is to learn (`evaluation.verdict`):

    logit(learned) = offset of the kind of images + slope · log10(units · ε)
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit, logit

from sfumato.evaluation.verdict import LEVELS, level_of
from sfumato.privacy.accountant import round_up
from sfumato.storage.documents import read_yaml

TABLE = Path(__file__).resolve().parent / "measured.yaml"
KINDS = ("grey", "colour", "chosen")  # the last: colour photographs, chosen among public ones
CUT = 0.3  # part of what is learned that is lost with the shortest fits: brain MRI at 18, 49 and 64 % of the steps


@dataclass(frozen=True)
class Forecast:
    """A part of what there is to learn. low, high: between them lie about two of three measured runs."""

    learned: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{level_of(self.learned)}, {100 * self.learned:.0f} % ({100 * self.low:.0f} to {100 * self.high:.0f})"


@dataclass(frozen=True)
class Line:
    """The line through the measured runs. spread: standard deviation of the runs around it, as a logit."""

    offsets: dict[str, float]
    slope: float
    spread: float

    def at(self, kind: str, product: float, fitted: float = 1.0) -> Forecast:
        """The forecast for units · ε. fitted: what `fitted` says of the length of the fits."""
        middle = self.offsets[kind] + self.slope * math.log10(product)
        parts = (fitted * float(expit(middle + step * self.spread)) for step in (0, -1, 1))
        return Forecast(*parts)

    def product_for(self, kind: str, learned: float) -> float:
        """The units · ε at which so much is expected to be learned."""
        return float(10 ** ((logit(learned) - self.offsets[kind]) / self.slope))


def measured_runs() -> list[dict[str, Any]]:
    """The table, with `learned` and `product` of each run."""
    runs = []
    for run in read_yaml(TABLE)["runs"]:
        chance = 100 / run["classes"]
        learned = (run["release"] - chance) / (run.get("real", 100) - chance)
        runs.append({**run, "learned": learned, "product": run["units"] * run["epsilon"]})
    return runs


@functools.cache
def measured_line(without: str | None = None) -> Line:
    """The line of least squares. without: a set to leave out, to forecast it from the others."""
    runs = [run for run in measured_runs() if run["set"] != without]
    kinds = [kind for kind in KINDS if any(run["kind"] == kind for run in runs)]
    columns = [[run["kind"] == kind for kind in kinds] + [math.log10(run["product"])] for run in runs]
    heights = logit([run["learned"] for run in runs])
    (*offsets, slope), *_ = np.linalg.lstsq(np.array(columns, dtype=float), heights)
    rest = heights - np.array(columns, dtype=float) @ [*offsets, slope]
    spread = math.sqrt(float(rest @ rest) / (len(runs) - len(kinds) - 1))
    return Line(dict(zip(kinds, map(float, offsets), strict=True)), float(slope), spread)


def fitted(grown: float) -> float:
    """The part of what is learned that is left with fits of such a length. grown: 0, the shortest, to 1, as measured."""
    return 1 - CUT * (1 - grown) ** 2


def advice(kind: str, units: int, epsilon: float, what: str) -> str:
    """What the product stands for, and how many units, or which ε, would lift the forecast by a level."""
    line, product = measured_line(), units * epsilon
    other = 10 if epsilon < 4 else 1
    same = f"{units:,} {what} at ε = {epsilon:g} behave as {max(1, round(product / other)):,} at ε = {other}"
    level = level_of(line.at(kind, product).learned)
    names = list(LEVELS)
    if level == names[0]:
        return same
    better = names[names.index(level) - 1]
    needed = line.product_for(kind, LEVELS[better][0])
    more = f"{int(round_up(needed / epsilon, 1)):,} {what}, or ε = {round_up(needed / units, 2):g}"
    return f"{same}; {more}, would make it {better}"
