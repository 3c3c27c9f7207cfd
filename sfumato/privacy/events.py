"""Mechanisms, their dp-accounting events, and the only JSON form in which they are stored.

A record of the ledger contains a mechanism instead of an epsilon, so a reader can apply any delta
and any accountant later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeGuard

from sfumato.errors import BudgetError
from sfumato.settings.data import GROUP, IMAGE
from sfumato.settings.fields import is_positive

if TYPE_CHECKING:
    # Imported for types only: the import takes a second, and stages without a charge do not need
    # it.
    from dp_accounting import DpEvent

SECRET = "os-entropy, AES counter"  # Noise source of a valid record
SEEDED = "seeded: for tests only"  # Every check refuses a record with this noise source
ADD_OR_REMOVE_ONE = "add-or-remove-one"
ZERO_OUT_ONE = "zero-out-one"
ADJACENCIES = (ADD_OR_REMOVE_ONE, ZERO_OUT_ONE)
MOST_USES = 10**9  # maximum number of uses of one mechanism
# Range of a mechanism's numbers and of norms. Their squares and products then fit into float64.
LOWEST = 1e-100
HIGHEST = 1e100
# Names of the units in records
UNITS = {IMAGE: "one (image, label)", GROUP: "all (image, label) of one group"}
PROTECTED = {
    UNITS[IMAGE]: "one image with its label",
    UNITS[GROUP]: "all images of one person with their labels",
}


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A sum with Gaussian noise, which is released `uses` times, each time over a new Poisson draw.

    Args:
        noise_multiplier: Standard deviation of the noise, divided by the L2 bound of one unit's
            contribution.
        sample_rate: Probability that a unit enters a draw.
        uses: Number of releases, each from a separate draw.
    """

    noise_multiplier: float
    sample_rate: float = 1.0
    uses: int = 1

    def __post_init__(self) -> None:
        _number(self.noise_multiplier, "noise_multiplier")
        _number(self.sample_rate, "sample_rate", high=1)
        if (
            not is_positive(self.uses)
            or not 1 <= self.uses <= MOST_USES
            or self.uses != int(self.uses)
        ):
            raise BudgetError(f"uses={self.uses} must be a whole number from 1 to {MOST_USES:,}")

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read a mechanism that `to_json` wrote.

        Args:
            data: Parsed JSON.

        Raises:
            BudgetError: `data` has any other form. No part of it is guessed or skipped.
        """
        uses = 1
        rate = 1.0
        inner = data
        if is_form(inner, "SelfComposed", "count", "event"):
            uses, inner = inner["count"], inner["event"]
        if is_form(inner, "PoissonSampled", "sampling_probability", "event"):
            rate, inner = (
                _number(inner["sampling_probability"], "sampling_probability", high=1),
                inner["event"],
            )
        if not is_form(inner, "Gaussian", "noise_multiplier") or type(uses) is not int:
            raise BudgetError(f"{str(data)[:120]} is not a mechanism that a ledger can contain")
        noise = _number(inner["noise_multiplier"], "noise_multiplier")
        return cls(noise_multiplier=noise, sample_rate=rate, uses=uses)

    def to_json(self) -> dict:
        content = {"type": "Gaussian", "noise_multiplier": float(self.noise_multiplier)}
        if self.sample_rate < 1:
            content = {
                "type": "PoissonSampled",
                "sampling_probability": float(self.sample_rate),
                "event": content,
            }
        return (
            content
            if self.uses == 1
            else {"type": "SelfComposed", "count": int(self.uses), "event": content}
        )

    @property
    def event(self) -> DpEvent:
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

        event: DpEvent = GaussianDpEvent(self.noise_multiplier)
        if self.sample_rate < 1:
            event = PoissonSampledDpEvent(self.sample_rate, event)
        return event if self.uses == 1 else SelfComposedDpEvent(event, self.uses)

    def __str__(self) -> str:
        return (
            f"noise_multiplier={self.noise_multiplier:g}, sample_rate={self.sample_rate:.4g}, "
            f"{self.uses} release{'s' * (self.uses > 1)}"
        )


def event_of(record: Mapping) -> DpEvent:
    return Mechanism.from_json(record["event"]).event


def common_adjacency(records: Iterable[Mapping]) -> str:
    """Return the adjacency that is valid for all records: add-or-remove-one if any record has
    it.
    """
    adjacencies = {record["adjacency"] for record in records}
    return ZERO_OUT_ONE if adjacencies == {ZERO_OUT_ONE} else ADD_OR_REMOVE_ONE


def is_form(data: object, kind: str, *keys: str) -> TypeGuard[dict]:
    """Return whether `data` is a mapping of type `kind` with exactly these keys."""
    return isinstance(data, dict) and data.keys() == {"type", *keys} and data["type"] == kind


def _number(value: object, name: str, high: float = HIGHEST) -> float:
    if not is_positive(value) or not LOWEST <= value <= high:
        raise BudgetError(
            f"a mechanism with {name}={value!r} gives no guarantee: expected {LOWEST:g} to {high:g}"
        )
    return float(value)
