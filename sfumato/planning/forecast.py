"""Forecast the usefulness of a release before anything is spent, from results on public images only.

The noise affects 500 persons at ε = 1 as much as 50 at ε = 10: their product decides. `benchmarks/forecast.py`
fits `forecast.yaml` to the results of public sets, as a share of what there is to learn (`evaluation.verdict`):

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

MOST_EPSILON = 10.0  # Largest ε that is recommended: above it, the guarantee is weak
LINE: dict[str, Any] = dict(read_yaml(Path(__file__).with_name("forecast.yaml")))


def kind_of(params: Params, channels: int | None) -> str | None:
    """The kind of public runs that a forecast goes by, one of the offsets; None for several labels, without any."""
    if params.data.labels == SEVERAL:
        return None
    if set(params.synthesize.sources) == {"select"}:
        return "chosen"
    return "colour" if channels == 3 else "grey"


def kept(grown: float, side: int, largest: int, product: float) -> float:
    """The part of it that is left with shorter fits and smaller images: above 1 where smaller ones teach more.

    grown: length of the fits, 0, the shortest, to 1, the longest that were measured; side: of the images in pixels, the
    longer one; largest: to which they could be resized; product: units · ε, as detail is lost in noise with few.
    """
    rule = LINE["sizes"]
    power = rule["offset"] + rule["slope"] * math.log10(product)
    fits = 1 - 0.3 * (1 - grown) ** 2  # by brain MRI with 18, 49 and 64 % of the longest
    return fits * float((min(side, rule["largest"]) / min(largest, rule["largest"])) ** power)


def expected_part(kind: str, product: float, left: float = 1.0, sure: float = 0.0) -> float:
    """The part of what there is to learn that is expected of units · ε.

    kind: one of the offsets; left: by `kept`; sure: standard deviations of the public results, of which two of three
    lay within one.
    """
    middle = LINE["offsets"][kind] + LINE["slope"] * math.log10(product)
    return left * float(expit(middle + sure * LINE["spread"]))


def forecast(kind: str, product: float, left: float) -> str:
    """Return the level, and the share in per cent with its range."""
    low, part, high = (expected_part(kind, product, left, sure) for sure in (-1, 0, 1))
    return f"{level_of(part)}, {100 * part:.0f} % ({100 * low:.0f} to {100 * high:.0f})"


def advice(kind: str, units: int, epsilon: float, what: str) -> str:
    """Translate units · ε to another ε, and state how many units would raise the forecast by a level.

    An ε that would do so is named too, up to MOST_EPSILON.
    """
    product = units * epsilon
    other = 10 if epsilon < 4 else 1
    same = f"{units:,} {what} at ε = {epsilon:g} are worth {max(1, round(product / other)):,} at ε = {other}"
    better = [name for name, (least, _) in VERDICT_LEVELS.items() if least > expected_part(kind, product)]
    if not better:
        return same
    needed = 10 ** ((logit(VERDICT_LEVELS[better[-1]][0]) - LINE["offsets"][kind]) / LINE["slope"])
    more = f"{int(round_up(needed / epsilon, 1)):,} {what}"
    larger = round_up(needed / units, 2)
    if larger <= MOST_EPSILON:
        more += f", or ε = {larger:g}"
    return f"{same}. With {more}, the forecast would be {better[-1]}"


def curve(kind: str, product: float) -> dict[str, Any]:
    """The forecast for a drawing: points (log10(units · ε), part) of "line" and its "band"; "runs": (name, point).

    kind: one of the offsets, of which the public runs are; product: units · ε of a project, whose point is "here".
    """
    powers = [step / 10 for step in range(15, 66)]
    low, line, high = ([(x, expected_part(kind, 10**x, sure=sure)) for x in powers] for sure in (-1, 0, 1))
    here = (math.log10(product), expected_part(kind, product))
    runs = [(run["name"], (math.log10(run["product"]), run["learned"])) for run in LINE["runs"] if run["kind"] == kind]
    return {"line": line, "band": high + low[::-1], "runs": runs, "here": here, "levels": VERDICT_LEVELS}
