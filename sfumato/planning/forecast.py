"""Forecast the usefulness of a release before anything is spent, from results on public images
only.

The noise has the same effect on 500 persons at ε = 1 as on 50 at ε = 10, so the forecast depends on
the number of persons times ε. The forecast is a share: how much a classifier learns from the
release, divided by how much it could learn from real images (`evaluation.verdict`).
`benchmarks/forecast.py` fits the following line to the results of public sets, and writes its
parameters to `forecast.yaml`:

    logit(learned) = offset of the kind of images + slope · log10(units · ε)
"""

import math
from pathlib import Path
from typing import Any

from scipy.special import expit, logit

from sfumato.evaluation.verdict import VERDICT_LEVELS, level_of
from sfumato.privacy.accountant import round_up
from sfumato.settings.data import SEVERAL
from sfumato.settings.params import Params
from sfumato.storage.documents import read_yaml

MOST_EPSILON = 10.0  # Largest recommended ε. The guarantee of a larger ε is weak
# With fewer images or persons than this, the range of a forecast is wider by the factor
# √(FEW_UNITS / number)
FEW_UNITS = 1000
LINE: dict[str, Any] = dict(read_yaml(Path(__file__).with_name("forecast.yaml")))


def kind_of(params: Params, channels: int | None) -> str | None:
    """Return the kind of public runs on which the forecast is based: a key of `offsets` in
    `forecast.yaml`, or None if images have several labels.
    """
    if params.data.labels == SEVERAL:
        return None
    if set(params.synthesize.sources) == {"select"}:
        return "chosen"
    return "colour" if channels == 3 else "grey"


def size_factor(fit_length: float, side: int, largest: int, product: float) -> float:
    """Return the factor by which shorter fits and smaller images change a forecast.

    The factor is 1 for the longest fits and the largest size.

    fit_length: how long networks are fitted, from 0 (the shortest fits that are proposed) to 1
    (the longest). The public results were measured with the longest fits;
    side: longer side of the images, in pixels;
    largest: longer side of the largest size to which the images could be resized, in pixels;
    product: units · ε. If the product is small, noise hides the details of large images, so smaller
    images are more useful.
    """
    rule = LINE["sizes"]
    power = rule["offset"] + rule["slope"] * math.log10(product)
    # The factor was chosen from results on brain MRI, with 18, 49 and 64 % of the training steps of
    # the longest fits
    fits = 1 - 0.3 * (1 - fit_length) ** 2
    return fits * float((min(side, rule["largest"]) / min(largest, rule["largest"])) ** power)


def expected_part(
    kind: str, product: float, size_factor: float = 1.0, spreads: float = 0.0
) -> float:
    """Forecast how much a classifier learns from the release, as a share of what it could learn
    from real images (0 to 1).

    To test the range, public sets were left out of the fit in turn. The range then contained at
    least 7/8 of the results of these sets.

    kind: key of `offsets` in `forecast.yaml`;
    product: units · ε;
    size_factor: result of `size_factor`;
    spreads: 0 for the forecast itself, `range_width(units)` for the upper end of its range, and
    -`range_width(units)` for the lower end.
    """
    middle = LINE["offsets"][kind] + LINE["slope"] * math.log10(product)
    part = size_factor * float(expit(middle))
    return float(expit(logit(part) + spreads * LINE["spread"]))


def range_width(units: int) -> float:
    """Return the factor by which a forecast's range is wider for a small number of units.

    The factor is 1 for FEW_UNITS units or more.
    """
    return max(1.0, (FEW_UNITS / units) ** 0.5)


def forecast(kind: str, units: int, epsilon: float, size_factor: float) -> str:
    """Describe the forecast: its level, its share in per cent, and the range of the share.

    The range is wider if there are fewer than FEW_UNITS units.
    """
    width = range_width(units)
    low, part, high = (
        expected_part(kind, units * epsilon, size_factor, spreads) for spreads in (-width, 0, width)
    )
    return f"{level_of(part)}, {100 * part:.0f} % ({100 * low:.0f} to {100 * high:.0f})"


def advice(kind: str, units: int, epsilon: float, noun: str, size_factor: float) -> str:
    """State how many units give the same forecast at another ε, and how many units would raise the
    forecast by one level, if any number would.

    If an ε of at most MOST_EPSILON would also raise the forecast by one level, state this ε.
    """
    product = units * epsilon
    other_epsilon = 10 if epsilon < 4 else 1
    comparison = (
        f"{units:,} {noun} at ε = {epsilon:g} are as useful as "
        f"{max(1, round(product / other_epsilon)):,} at ε = {other_epsilon}"
    )
    part = expected_part(kind, product, size_factor)
    better = [name for name, (minimum, _) in VERDICT_LEVELS.items() if minimum > part]
    if not better or VERDICT_LEVELS[better[-1]][0] >= size_factor:
        return comparison
    target = VERDICT_LEVELS[better[-1]][0] / size_factor
    needed_product = 10 ** ((logit(target) - LINE["offsets"][kind]) / LINE["slope"])
    increase = f"{int(round_up(needed_product / epsilon, 1)):,} {noun}"
    larger_epsilon = round_up(needed_product / units, 2)
    if larger_epsilon <= MOST_EPSILON:
        increase += f", or ε = {larger_epsilon:g}"
    return f"{comparison}. With {increase}, the forecast would be {better[-1]}"


def curve(kind: str, product: float) -> dict[str, Any]:
    """Return the data of the forecast's plot. A point is (log10(units · ε), share).

    "line" is a list of points; "band" is a list of points that outlines the range; "runs" has one
    (name, point) per public run; "here" is the point of the project; "levels" are the levels of the
    verdict.

    kind: key of `offsets` in `forecast.yaml`, which also selects the public runs;
    product: units · ε of the project.
    """
    powers = [step / 10 for step in range(15, 66)]
    low, line, high = (
        [(x, expected_part(kind, 10**x, spreads=spreads)) for x in powers] for spreads in (-1, 0, 1)
    )
    point = (math.log10(product), expected_part(kind, product))
    runs = [
        (run["name"], (math.log10(run["product"]), run["learned"]))
        for run in LINE["runs"]
        if run["kind"] == kind
    ]
    return {
        "line": line,
        "band": high + low[::-1],
        "runs": runs,
        "here": point,
        "levels": VERDICT_LEVELS,
    }
