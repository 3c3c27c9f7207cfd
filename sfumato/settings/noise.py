"""How a query asks for noise, and the settings that every query has."""

import math
import re
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from sfumato.settings.fields import REST, Settings, is_positive


def parse_noise(value: object) -> object:
    """The three ways to ask for noise: a multiplier (5.0), a share of the RDP budget ("3%"), or "rest"."""
    if isinstance(value, str) and value != REST:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value)
        if not match or not 0 < float(match[1]) < 100:
            raise ValueError(f"{value!r} is not a noise: give a multiplier (5.0), a share ('3%') or 'rest'")
        return f"{float(match[1]):g}%"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not 1e-4 <= value <= 1e7:
        raise ValueError(f"a noise multiplier must be positive and finite, from 0.0001 to 10 million, not {value}")
    return value


def at_epsilon(epsilon: float, table: dict[Any, float]) -> float:
    """A number that depends on ε: linear in ln ε between the entries of `table`, constant beyond them."""
    import numpy as np  # slow: not for `stage --help`

    for key in table:
        if not is_positive(key):
            raise ValueError(f"{key} is not an entry by ε: give a positive number")
    if not table:
        raise ValueError("a table by ε needs an entry, such as 1: 30%")
    entries = sorted(table)
    return float(np.interp(math.log(epsilon), np.log(entries), [table[key] for key in entries]))


def noise_at(epsilon: float, table: dict[Any, Any]) -> str:
    """A share that depends on ε: {1: "30%", 10: "5%"} is a power of ε between its ends. Raises ValueError."""
    logarithms = {}
    for key, value in table.items():
        share = parse_noise(value)
        if not isinstance(share, str) or share == REST:
            raise ValueError(f"{key}: {value} is not an entry by ε: give a positive ε and a share, such as 1: 30%")
        logarithms[key] = math.log(float(share[:-1]))
    return f"{math.exp(at_epsilon(epsilon, logarithms)):.4g}%"


def weights_at(epsilon: float, sources: dict[str, Any]) -> dict[str, Any]:
    """Resolve weights that depend on ε: {1: 2, 10: 0} is 2 at ε = 1 and 0 from ε = 10 on. Raises ValueError."""
    weights = {}
    for name, weight in sources.items():
        if isinstance(weight, dict):
            for key, value in weight.items():
                if value != 0 and not is_positive(value):
                    raise ValueError(f"{key}: {value} is not an entry by ε: give a positive ε and a weight from 0 on")
            weight = round(at_epsilon(epsilon, weight), 4)
            if weight == 0:
                continue
        weights[name] = weight
    return weights


Noise = Annotated[float | str, BeforeValidator(parse_noise)]


class QuerySettings(Settings):
    """The parameters of a query. The plan solves for `noise`; the query never sees it.

    `batch` is the expected number of images in a draw. Without it, or if it is None, all are drawn.
    """

    releases: ClassVar[str] = ""  # the key that holds the number of releases, if there can be several
    noise: Noise

    def sampling(self, size_hint: int) -> tuple[float, int]:
        """(sample rate, number of releases), from public numbers only."""
        batch = getattr(self, "batch", None) or size_hint
        return min(1.0, batch / size_hint), getattr(self, self.releases, 1)
