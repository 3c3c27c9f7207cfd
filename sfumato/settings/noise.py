"""The setting `noise` of queries, settings that depend on ε, and settings that every query has."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BeforeValidator

from sfumato.settings.fields import REST, Settings, is_positive


def parse_noise(value: object) -> object:
    """Parse the noise of a query: a multiplier (5.0), a share of the budget ("3%"), or "rest"."""
    if isinstance(value, str) and value != REST:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value)
        if not match or not 0 < float(match[1]) < 100:
            raise ValueError(
                f"{value!r} is not a noise setting: expected a multiplier (5.0), a share ('3%') or "
                "'rest'"
            )
        return f"{float(match[1]):g}%"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not 1e-4 <= value <= 1e7:
        raise ValueError(
            f"the noise multiplier {value} is out of range: expected 0.0001 to 10 million"
        )
    return value


def at_epsilon(epsilon: float, table: Mapping[float, float]) -> float:
    """Look up a number that depends on ε. Between two entries of the table, it is linear in ln ε.

    Below the smallest and above the largest ε of the table, it is constant.
    """
    import numpy as np  # slow: not for `stage --help`

    for key in table:
        if not is_positive(key):
            raise ValueError(f"{key!r} is not a value of ε: expected a positive number")
    if not table:
        raise ValueError(
            "the table of values by ε is empty: expected at least one entry 'ε: value'"
        )
    entries = sorted(table)
    return float(np.interp(math.log(epsilon), np.log(entries), [table[key] for key in entries]))


def noise_at(epsilon: float, table: Mapping[float, object]) -> str:
    """Look up a query's share of the budget at `epsilon` in a table such as {1: "30%", 10: "5%"}.

    Between two entries, the share is proportional to a power of ε. Raises ValueError unless each
    entry maps a positive ε to a share.
    """
    logarithms = {}
    for key, value in table.items():
        share = parse_noise(value)
        if not isinstance(share, str) or share == REST:
            raise ValueError(
                f"the noise for ε = {key} is {value}: expected a share of the budget, such as 30%"
            )
        logarithms[key] = math.log(float(share[:-1]))
    return f"{math.exp(at_epsilon(epsilon, logarithms)):.4g}%"


def weights_at(epsilon: float, sources: Mapping[str, object]) -> dict[str, object]:
    """Resolve weights that depend on ε.

    For example, the weight {1: 2, 10: 0} is 2 up to ε = 1, 0 from ε = 10 on, and linear in ln ε in
    between. If such a weight is 0 at `epsilon`, its source is left out. Raises ValueError unless
    each entry maps a positive ε to a weight of at least 0.
    """
    weights: dict[str, object] = {}
    for name, weight in sources.items():
        if isinstance(weight, dict):
            for key, value in weight.items():
                if value != 0 and not is_positive(value):
                    raise ValueError(
                        f"the weight of {name} for ε = {key} is {value}: expected 0 or a positive "
                        "number"
                    )
            weight = round(at_epsilon(epsilon, weight), 4)
            if weight == 0:
                continue
        weights[name] = weight
    return weights


Noise = Annotated[float | str, BeforeValidator(parse_noise)]


class QuerySettings(Settings):
    """The parameters of a query.

    The plan computes a noise multiplier from `noise`. The query itself does not read `noise`.

    Some queries have the setting `batch`, the expected number of images in a draw. If a query has
    no such setting, or if the setting is None, all images are drawn.
    """

    releases: ClassVar[str] = ""  # key with the number of releases, if there can be several
    noise: Noise

    def sampling(self, size_hint: int) -> tuple[float, int]:
        """Return (sample rate, number of releases), from public numbers only."""
        batch = getattr(self, "batch", None) or size_hint
        return min(1.0, batch / size_hint), getattr(self, self.releases, 1)
