"""Define the form of a record in a ledger, and find reasons not to trust a record."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from sfumato.errors import BudgetError
from sfumato.privacy.events import ADJACENCIES, SECRET, UNITS, Mechanism
from sfumato.settings.data import GROUP, DatasetId
from sfumato.settings.fields import Positive
from sfumato.settings.stages import QUERIES, STAGES
from sfumato.storage.documents import Exact, validated


@dataclass(frozen=True, kw_only=True)
class Record(Exact):
    id: str  # the id of a charge's first record is also the name of the run's directory
    stage: str
    dataset_id: DatasetId
    data_version: str
    unit: str
    adjacency: str
    event: dict[str, Any]
    released: str
    sensitivity: str
    noise_source: str
    max_norm: float
    plan: str
    settings: str
    again: Annotated[int, Field(ge=0)]
    versions: dict[str, str]
    # At most the year 9999, the last that Python's dates support
    time: Annotated[int, Field(ge=0, le=253_402_300_799)]
    revision: Positive = 1
    code: dict[str, str] = field(default_factory=dict)  # field of version 0.2's journals
    group_weight: str = ""  # weight of a group, if the unit is a group
    claim: str = ""  # the owner's statement about persons, if the unit is an image


def is_record(content: object) -> bool:
    """Return whether `content` has the form of a record whose mechanism can be composed."""
    try:
        Mechanism.from_json(validated(Record, content).event)
    except (ValueError, BudgetError):
        return False
    return True


def record_problems(label: str, record: object) -> list[str]:
    """List the reasons not to trust a record, one sentence each.

    label: name to use in messages if the record has no valid id.
    """
    if isinstance(record, dict) and not re.fullmatch("[0-9a-f]{32}", str(record.get("id"))):
        return [f"{label} has no id of 32 hexadecimal digits"]
    try:
        validated(Record, record)
    except ValueError as error:
        return [f"{label} is not a complete record ({error})"]
    assert isinstance(record, dict)
    name = f"record {record['id'][:8]}"
    problems = []
    if record["stage"] not in STAGES:
        problems.append(
            f"{name} comes from stage {record['stage']!r}, which this installation does not have: "
            "install the package that declares it"
        )
    elif record["stage"] not in QUERIES:
        problems.append(f"{name} comes from stage {record['stage']!r}, which is not a query")
    if record["adjacency"] not in ADJACENCIES:
        problems.append(f"{name} has the unknown adjacency {record['adjacency']!r}")
    grouped = record["unit"] == UNITS[GROUP]
    if record["unit"] not in UNITS.values():
        problems.append(f"{name} has the unknown unit {record['unit']!r}")
    elif grouped and "group_weight" not in record:
        problems.append(f"{name} protects groups, but has no group_weight")
    elif not grouped and "group_weight" in record:
        problems.append(f"{name} protects single images, but has a group_weight")
    if grouped and "claim" in record:
        problems.append(
            f"{name} protects groups, but has the key `claim`, which is allowed only in records "
            "for single images"
        )
    if record["noise_source"] != SECRET:
        seeded = f"a seeded noise source ({record['noise_source']})"
        problems.append(f"{name} ({record['stage']}) used {seeded}, so it has no privacy guarantee")
    try:
        Mechanism.from_json(record["event"])
    except BudgetError as error:
        problems.append(f"{name} ({record['stage']}): {error}")
    return problems
