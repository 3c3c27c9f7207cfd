"""Check the owner's lifetime budget, and that the journal contains every known charge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sfumato.data.cards import Card
from sfumato.errors import BudgetError
from sfumato.privacy.accountant import LARGEST_DELTA, epsilon
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, ZERO_OUT_ONE, Mechanism
from sfumato.privacy.odometer import Odometer, Seen
from sfumato.privacy.profile import bound_text
from sfumato.settings.data import GROUP, OF_THE_OWNER
from sfumato.settings.fields import is_positive
from sfumato.settings.privacy import UNLIMITED
from sfumato.storage.documents import Exact

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True, kw_only=True)
class SpendingPolicy(Exact):
    """Permissions and declarations of the owner.

    They are stored apart from the plans of the stages, so changing them does not rerun any stage.
    """

    delta: float
    lifetime_epsilon: float | str  # limit for all charges on the dataset, or "unlimited"
    accountant: Literal["rdp", "pld", "exact"] = "rdp"
    declared_size: bool = False
    one_image_each: bool = False

    def __post_init__(self) -> None:
        limit = self.lifetime_epsilon
        if limit != UNLIMITED and not is_positive(limit):
            raise BudgetError(
                f"lifetime_epsilon={limit!r} is not a budget: expected a positive number or "
                f"{UNLIMITED!r}"
            )
        if not 0 < self.delta <= LARGEST_DELTA:
            raise BudgetError(
                f"delta={self.delta:g} is not allowed: expected more than 0 and at most "
                f"{LARGEST_DELTA:g}"
            )

    @property
    def adjacency(self) -> str:
        if self.declared_size:
            return ZERO_OUT_ONE
        return ADD_OR_REMOVE_ONE


def check_known(odometer: Odometer, card: Card, seen: Seen, bounded: bool) -> None:
    """Raise BudgetError if the journal lacks some of `seen`.

    If the images come from a public source, this is checked only if there is a lifetime budget.

    bounded: whether there is a lifetime budget.
    """
    missing = odometer.missing(seen)
    if missing and (card.source in OF_THE_OWNER or bounded):
        raise BudgetError(
            f"the journal {odometer.path} lacks the entry {min(missing)[:8]}, or lists a charge "
            f"with this id as still open, but a ledger or a release of dataset {card.dataset_id!r} "
            "refers to it. The journal is therefore an older copy or a different journal, and past "
            "spending is unknown. Restore the newest state directory, or run `stage ledger adopt`. "
            "This command counts the charges in ledger.json and in the releases, and marks the "
            "odometer permanently as incomplete"
        )


def check_lifetime(
    odometer: Odometer, mechanisms: Mapping[str, Mechanism], permission: SpendingPolicy, unit: str
) -> None:
    """Raise BudgetError if the past charges and the next run together exceed the lifetime budget.

    mechanisms: mechanisms of the next run, by stage; unit: unit of privacy of the next run.
    """
    limit = permission.lifetime_epsilon
    dataset = odometer.dataset_id
    if isinstance(limit, str):
        return

    if odometer.spent_otherwise(unit):
        unit_name = "person" if unit == GROUP else "image"
        raise BudgetError(
            f"privacy.lifetime_epsilon={limit:g} of dataset {dataset!r} cannot be guaranteed: "
            "some charges were opened under another privacy unit or with other groups, and their "
            f"cost for one {unit_name} is unknown. Prepare the images as before, or set "
            f"privacy.lifetime_epsilon: {UNLIMITED}, if the owner of the images agrees"
        )

    def cost(events: Iterable[DpEvent]) -> float:
        return epsilon(events, permission.delta, permission.accountant, permission.adjacency)

    past_events = odometer.events()
    total = cost([*past_events, *(mechanism.event for mechanism in mechanisms.values())])
    if total <= limit:
        return
    by_stage: dict[str, list[DpEvent]] = {}
    for record, event in zip(odometer.opened(), past_events, strict=True):
        by_stage.setdefault(record["stage"], []).append(event)
    lower = ""
    if cost(past_events) < 0.99 * limit:  # some budget is left
        lower = (
            ", or set a smaller privacy.epsilon for this plan (and privacy.lifetime_epsilon: "
            f"{limit:g}, if it is not set yet, because its default is privacy.epsilon)"
        )
    past = ", ".join(
        f"{name} {cost(events):.3g} ({len(events)} ×)" for name, events in by_stage.items()
    )
    future = ", ".join(
        f"{name} {cost([mechanism.event]):.3g}" for name, mechanism in mechanisms.items()
    )
    raise BudgetError(
        f"privacy.lifetime_epsilon={limit:g} of dataset {dataset!r} would be exceeded: ε = "
        f"{cost(past_events):.4g} is already spent{f' on {past}' if past else ''}, and the next "
        f"run ({future}) would raise the total to {total:.4g}. Each stage's ε is the cost of this "
        f"stage by itself, at δ = {bound_text(permission.delta, 3)}, so these numbers do not add "
        "up to the total. `stage ledger history` lists all charges. Keep the old release, if this "
        "project has one (undo the edit of params.yaml, or `git checkout` params.yaml and "
        f"dvc.lock), or raise privacy.lifetime_epsilon to {math.ceil(total * 100) / 100:g} if the "
        f"owner of the images agrees{lower}"
    )
