"""Build and read the ledger, which composes every charge that a release depends on.

`sfumato.privacy.check` checks a ledger.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sfumato.errors import UNREADABLE, BudgetError, ConfigError, explained, passing_over
from sfumato.privacy.accountant import BOUNDS, EXACT, epsilon, shares_of_rdp
from sfumato.privacy.events import Mechanism, common_adjacency, event_of
from sfumato.settings.fields import Positive, PositiveFloat
from sfumato.settings.stage import LOCK
from sfumato.settings.stages import QUERIES
from sfumato.storage.digest import canonical, digest_of
from sfumato.storage.documents import Exact, MergeConflict, quoted, read_json, validated
from sfumato.storage.files import json_text
from sfumato.storage.records import Records


@dataclass(frozen=True, kw_only=True)
class StageLine:
    epsilon: float
    share: float
    records: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OdometerLine(Exact):
    dataset_id: str
    charges: int
    epsilon: float
    others: tuple[dict, ...]
    complete: bool
    head: str | None


@dataclass(frozen=True, kw_only=True)
class Budget:  # budget of the plan
    recipe: str
    accountant: str
    delta: Annotated[float, Field(gt=0, lt=1)]
    size_hint: Positive
    target: PositiveFloat


@dataclass(frozen=True, kw_only=True)
class Ledger(Budget, Exact):
    """Form of a ledger, except its records, which are checked one by one."""

    schema: int
    adjacency: str
    epsilon: dict[str, float]
    stages: dict[str, StageLine]
    records: tuple[Any, ...]
    odometer: OdometerLine
    digest: str
    apart: tuple[str, ...] = ()  # see `Records`


KEYS = {field.name for field in fields(Ledger)}
# Content of a plan's budget.json, which `read_budget` checks
BudgetFile = dict[str, Any]
LAST_OF_SCHEMA_4 = "7569af49"


def read_budget(path: Path) -> BudgetFile:
    """Read the budget of a plan. Raises ConfigError if the file is missing or is not a budget."""
    with explained(ConfigError, lambda error: f"{path} cannot be read ({error}): run `stage plan`"):
        validated(Budget, content := read_json(path))
    return content


def spent_on_one(records: Records, delta: float, accountant: str, adjacency: str) -> float:
    """Return epsilon of all records together.

    If the owners declared that no person is in two of their sets, return the largest epsilon among
    the owners' sets instead.
    """
    parts = [part.values() for part in records.of_one_person().values()]
    return max(epsilon(map(event_of, part), delta, accountant, adjacency) for part in parts)


def by_line(accountant: str) -> str:
    """Return the accountant that computes the ε of a ledger's stages and the ε of its odometer.

    It is `exact` if the ledger's accountant is `exact`, otherwise `rdp`.
    """
    if accountant == EXACT:
        return EXACT
    return "rdp"


def compose(records: Records, delta: float, accountant: str = "rdp") -> dict:
    """Compute the cost of the records, in total and by stage.

    In the result, `epsilon` contains the total by every accountant, and `stages` contains the
    epsilon of each stage by itself and its share of the RDP. If the owners declared that no person
    is in two of their sets, each epsilon is the largest among the owners' sets, and the shares are
    computed for the set that costs most. Raises BudgetError if the records have different privacy
    units, because such records cannot be composed.
    """
    if len(records.units) > 1:
        raise BudgetError(
            f"records with different privacy units ({', '.join(records.units)}) cannot be composed"
        )
    # A Gaussian sum costs the same under both adjacencies, so records of both can be composed
    adjacency = common_adjacency(records.values())
    dearest = max(
        records.of_one_person().values(),
        key=lambda part: epsilon(map(event_of, part.values()), delta, "rdp", adjacency),
    )
    shares = shares_of_rdp(
        {name: [*map(event_of, dearest.of_stage(name).values())] for name in QUERIES}, delta
    )
    by_stage = {name: records.of_stage(name) for name in QUERIES}
    return {
        "adjacency": adjacency,
        "epsilon": {
            name: spent_on_one(records, delta, name, adjacency) for name in {*BOUNDS, accountant}
        },
        "stages": {
            name: {
                "epsilon": spent_on_one(part, delta, by_line(accountant), adjacency),
                "share": shares[name],
                "records": sorted(part),
            }
            for name, part in by_stage.items()
        },
    }


def odometer_line(
    records: Sequence[dict],
    journal: Sequence[dict],
    delta: float,
    dataset_id: str,
    head: str | None,
    accountant: str,
) -> dict:
    """Compute the ledger's entry about the odometer: the cost of all charges ever opened on a
    dataset.

    The entry counts the charges in the dataset's journal and in the release's records, including
    abandoned charges. In the result, `others` contains the mechanisms of charges on which the
    release does not depend.

    head: journal head (see `sfumato.privacy.odometer`), or None if the journal may lack charges, or
    if the cost of some charges is unknown. With None, the odometer is marked as incomplete.
    """
    released = {
        record["id"]: record["event"] for record in records if record["dataset_id"] == dataset_id
    }
    others = sorted(
        (record["event"] for record in journal if record["id"] not in released), key=canonical
    )
    events = [Mechanism.from_json(event).event for event in (*released.values(), *others)]
    spent = epsilon(events, delta, by_line(accountant))
    line = {"dataset_id": dataset_id, "charges": len(events), "epsilon": spent, "others": others}
    return {**line, "complete": head is not None, "head": head}


def build_ledger(
    budget: Mapping,
    records: Records,
    journal: Sequence[dict],
    *,
    dataset_id: str | None = None,
    head: str | None = None,
) -> dict:
    """Build the ledger of a release.

    journal: records of all charges in the dataset's journal;
    dataset_id: id of this dataset; the default is the dataset of the first record;
    head: see `odometer_line`.
    """
    delta = budget["delta"]
    accountant = budget["accountant"]
    rows = [*records.values()]
    if dataset_id is None:
        dataset_id = next((record["dataset_id"] for record in (*rows, *journal)), "")
    ledger = {
        "schema": 5,
        **{key: budget[key] for key in ("recipe", "accountant", "delta", "size_hint", "target")},
        **compose(records, delta, accountant),
        "records": rows,
        "odometer": odometer_line(rows, journal, delta, dataset_id, head, accountant),
        **records.declaration(),
    }
    return {**ledger, "digest": digest_of(ledger)}


def ledger_text(ledger: Mapping) -> str:
    return json_text(ledger, sort_keys=True, allow_nan=False)


def read_ledger(path: Path) -> dict:
    """Read and return the content of a ledger.

    Args:
        path: Path of a `ledger.json`.

    Raises:
        BudgetError: The file is missing or not a complete ledger.
    """
    write = "run `stage ledger write` (or `dvc repro`)"
    missing = f"{path} does not exist: {write}"
    with explained(BudgetError, lambda error: unreadable(path, error), missing=missing):
        ledger = read_json(path)
    keys = {*ledger, "apart"} if isinstance(ledger, dict) else set()
    if keys != KEYS:
        raise BudgetError(
            f"{path} is not a ledger. Keys that are missing or unknown: "
            f"{', '.join(sorted(KEYS ^ keys))}. Restore it from git, or {write}"
        )
    if ledger["schema"] == 4:
        raise BudgetError(
            f"{path} has schema 4, which version 0.2 wrote. Commit {LAST_OF_SCHEMA_4} of Sfumato "
            "is the last one that can read it: run `dvc repro` once with that commit, then "
            "upgrade. This keeps all releases and spends nothing."
        )
    if ledger["schema"] != 5 or not isinstance(ledger["records"], list):
        raise BudgetError(
            f"{path} has schema {ledger['schema']!r}, but this version reads only schema 5: {write}"
        )
    return ledger


def unreadable(path: Path, error: Exception) -> str:
    """Describe why a ledger cannot be read, and what to do."""
    if isinstance(error, MergeConflict):
        take = (
            f"take one side of this file and of {LOCK} (`git checkout HEAD -- {quoted(path)} "
            f"{LOCK}` takes yours)"
        )
        return f"{path} contains both sides of a merge conflict: {take}, and then run `dvc repro`"
    return (
        f"{path} is truncated or not JSON ({error}): restore it from git, or run `stage ledger "
        "write`"
    )


def by_id(ledger: Mapping) -> dict[str, dict]:
    """Return the records of a ledger of any schema version, by id.

    Records without an id are skipped; `check_ledger` reports them.
    """
    records = ledger.get("records")
    if isinstance(records, Mapping):
        records = list(records.values())
    if not isinstance(records, list):
        return {}
    valid_records = (
        record
        for record in records
        if isinstance(record, dict) and isinstance(record.get("id"), str)
    )
    return {record["id"]: record for record in valid_records}


def records_in(file: Path) -> list[dict]:
    """Return the records in a ledger or a `privacy.json`, without checking them.

    Returns an empty list if the file cannot be read.
    """
    with passing_over(*UNREADABLE):
        return list(by_id(read_json(file)).values())
    return []


def seen_of(ledger: Mapping, dataset_id: str) -> set[str]:
    """Return the journal head (see `sfumato.privacy.odometer`) and the record ids that a ledger
    contains for a dataset.
    """
    seen = {key for key, record in by_id(ledger).items() if record.get("dataset_id") == dataset_id}
    odometer = ledger.get("odometer")
    if (
        isinstance(odometer, Mapping)
        and odometer.get("dataset_id") == dataset_id
        and odometer.get("head")
    ):
        seen.add(str(odometer["head"]))
    return seen
