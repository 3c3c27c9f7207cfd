"""The ledger: every charge behind a release, composed and checked from git alone.

It trusts no stored number: it computes epsilon again from the records' mechanisms and compares.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

from dp_accounting import DpEvent
from pydantic import AfterValidator, Field

from sfumato.errors import BudgetError, ConfigError, explained
from sfumato.privacy.accountant import ACCOUNTANTS, RELATIONS, epsilon, shares_of_rdp
from sfumato.privacy.events import SECRET, UNITS, common_adjacency, event_from_json
from sfumato.settings.data import GROUP, DatasetId
from sfumato.settings.fields import Positive, PositiveFloat
from sfumato.settings.stages import QUERIES
from sfumato.storage.artifacts import as_text, empty_content
from sfumato.storage.digest import canonical, digest_of
from sfumato.storage.documents import EXACT, read_json, read_yaml, second, validated

SCHEMA, READABLE = 5, (4, 5)  # schema 4 had digests of code for the revisions
RECORD_ID = re.compile("[0-9a-f]{32}")  # it also names a directory
HEAD = re.compile("[0-9a-f]{64}")  # of a journal
TOLERANCE = 1e-6  # relative, between stored and recomputed epsilon


# --- the form of what files hold, which is checked before anything else -----------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Record:
    """The form of a record."""

    __pydantic_config__: ClassVar = EXACT

    id: str
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
    time: Annotated[int, AfterValidator(second)]
    revision: Positive = 1
    code: dict[str, str] = field(default_factory=dict)  # of schema 4
    group_weight: str = ""  # how a group counts, where the unit is one
    claim: str = ""  # what the owner says of a unit of one image


@dataclass(frozen=True, kw_only=True)
class StageLine:
    """What a ledger says of one stage."""

    epsilon: float
    share: float
    records: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OdometerLine:
    """What a ledger says of everything ever opened."""

    __pydantic_config__: ClassVar = EXACT

    dataset_id: str
    charges: int
    epsilon: float
    others: tuple[dict[str, Any], ...]
    complete: bool
    head: str | None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a ledger takes from the plan."""

    recipe: str
    accountant: str
    delta: Annotated[float, Field(gt=0, lt=1)]
    size_hint: Positive
    target: PositiveFloat


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The form of a ledger; its records are checked one by one."""

    __pydantic_config__: ClassVar = EXACT

    schema: int
    recipe: str
    accountant: str
    adjacency: str
    delta: PositiveFloat
    size_hint: int
    target: PositiveFloat
    epsilon: dict[str, float]
    stages: dict[str, StageLine]
    records: tuple[Any, ...]
    odometer: dict[str, Any]
    digest: str


KEYS = {field.name for field in fields(Ledger)}


def read_budget(path: Path) -> dict[str, Any]:
    """The budget of a plan. Raises ConfigError where the file is missing or none."""
    with explained(ConfigError, lambda error: f"{path} cannot be read ({error}): run `stage plan`"):
        validated(Budget, content := read_json(path))
    return content


def is_record(content: object) -> bool:
    """Whether this has the form of a record."""
    try:
        validated(Record, content)
    except ValueError:
        return False
    return True


def compose(records: Sequence[dict], delta: float) -> dict:
    """The cost of the records: `epsilon` by every accountant; `stages`, each one's own epsilon and share of the RDP.

    Raises BudgetError where they are of different units: what they cost together says nothing of either.
    """
    if len(units := {record["unit"] for record in records}) > 1:
        raise BudgetError(f"records of different units ({', '.join(sorted(units))}) make no one claim")
    by_stage: dict[str, list[DpEvent]] = {name: [] for name in QUERIES}
    for record in records:
        by_stage[record["stage"]].append(event_from_json(record["event"]))
    adjacency = common_adjacency(records)  # under either relation a Gaussian sum costs the same
    every = [event for events in by_stage.values() for event in events]
    shares = shares_of_rdp(by_stage, delta)
    return {
        "adjacency": adjacency,
        "epsilon": {name: epsilon(every, delta, name, adjacency) for name in ACCOUNTANTS},
        "stages": {
            name: {
                "epsilon": epsilon(events, delta, "rdp", adjacency),
                "share": shares[name],
                "records": sorted(record["id"] for record in records if record["stage"] == name),
            }
            for name, events in by_stage.items()
        },
    }


def odometer_line(
    records: Sequence[dict], journal: Sequence[dict], delta: float, dataset_id: str, head: str | None
) -> dict:
    """Everything ever opened on a dataset: the union of its journal and of the release's records, aborted charges too.

    journal: its records; head: of the journal, where it is at hand and lacks nothing that is known of it; else None,
    and the line says that it is incomplete. `others`: the mechanisms of charges that the release does not depend on.
    """
    own = {record["id"]: record["event"] for record in records if record["dataset_id"] == dataset_id}
    others = sorted((record["event"] for record in journal if record["id"] not in own), key=canonical)
    events = [event_from_json(event) for event in (*own.values(), *others)]
    return {
        "dataset_id": dataset_id,
        "charges": len(events),
        "epsilon": epsilon(events, delta),
        "others": others,
        "complete": head is not None,
        "head": head,
    }


def build_ledger(
    budget: Mapping,
    records: Mapping[str, dict],
    journal: Sequence[dict],
    *,
    dataset_id: str | None = None,
    head: str | None = None,
) -> dict:
    """The ledger of a release. budget: the plan's; journal, head: as `odometer_line` takes them.

    dataset_id: whose journal it is; None: the first that the records name.
    """
    delta = budget["delta"]
    rows = [records[key] for key in sorted(records)]
    if dataset_id is None:
        dataset_id = next((record["dataset_id"] for record in (*rows, *journal)), "")
    ledger = {
        "schema": SCHEMA,
        "recipe": budget["recipe"],
        "accountant": budget["accountant"],
        "delta": delta,
        "size_hint": budget["size_hint"],
        "target": budget["target"],
        **compose(rows, delta),
        "records": rows,
        "odometer": odometer_line(rows, journal, delta, dataset_id, head),
    }
    return {**ledger, "digest": digest_of(ledger)}


def ledger_text(ledger: Mapping) -> str:
    return json.dumps(ledger, indent=1, sort_keys=True, allow_nan=False) + "\n"


def read_ledger(path: Path) -> dict:
    """Read a ledger. Raises BudgetError where the file is missing or not a whole ledger."""
    write, again = "run `stage ledger write` (or `dvc repro`)", "restore it from git, or run `stage ledger write`"
    broken, missing = f"{path} is truncated or not JSON", f"{path} does not exist: {write}"
    with explained(BudgetError, lambda error: f"{broken} ({error}): {again}", missing=missing):
        ledger = read_json(path)
    if not isinstance(ledger, dict) or set(ledger) != KEYS:
        found = set(ledger) if isinstance(ledger, dict) else set()
        raise BudgetError(f"{path} is not a ledger: missing {sorted(KEYS - found)}, unknown {sorted(found - KEYS)}")
    if ledger["schema"] not in READABLE or not isinstance(ledger["records"], list):
        raise BudgetError(f"{path} has schema {ledger['schema']!r}, this version reads {SCHEMA}: {write}")
    return ledger


def by_id(ledger: Mapping) -> dict[str, dict]:
    """The records of a ledger, of any version, by id. It skips records without an id: `check_ledger` reports these."""
    records = ledger.get("records")
    records = records.values() if isinstance(records, Mapping) else records if isinstance(records, list) else ()
    return {
        record["id"]: record for record in records if isinstance(record, dict) and isinstance(record.get("id"), str)
    }


def seen_of(ledger: Mapping, dataset_id: str) -> set[str]:
    """What a ledger names of the journal of a dataset: its head, and the ids of its records on that dataset."""
    rows = by_id(ledger).values()
    odometer, found = ledger.get("odometer"), {row["id"] for row in rows if row.get("dataset_id") == dataset_id}
    if isinstance(odometer, Mapping) and odometer.get("dataset_id") == dataset_id and odometer.get("head"):
        found.add(str(odometer["head"]))
    return found


def check_ledger(
    ledger: Mapping, *, limit: float | None = None, delta: float | None = None, unit: str | None = None
) -> tuple[float, list[str]]:
    """Compute epsilon again from the records, and list every reason why the ledger does not hold.

    limit: the largest epsilon allowed, beside the ledger's own target; delta: by default the ledger's; unit: "image" or
    "group", where the ledger must be of that one.
    """
    problems = malformed(ledger)
    if problems:
        return float("inf"), problems
    if digest_of({key: value for key, value in ledger.items() if key != "digest"}) != ledger["digest"]:
        problems.append("its digest does not fit its content: it was edited")
    delta = ledger["delta"] if delta is None else delta
    hint = ledger["size_hint"]
    if not isinstance(hint, int) or hint < 1 or not isinstance(delta, (int, float)) or not 0 < delta <= 1 / hint:
        problems.append(f"delta={delta} is above 1/size_hint (size_hint={hint}): it would allow publishing an image")
        return float("inf"), problems
    records = ledger["records"]
    for number, record in enumerate(records):
        problems += record_problems(f"record {number}", record)
    if not problems and len(by_id(ledger)) < len(records):
        problems.append("it lists a record twice")
    units = {record["unit"] for record in records} if not problems else set()
    if len(units) > 1:
        problems.append(f"its records are of different units ({', '.join(sorted(units))}), which make no one claim")
    elif unit is not None and units - {UNITS[unit]}:
        problems.append(f"it protects {units.pop()}, not {UNITS[unit]}: an ε of the one says nothing of the other")
    if problems:
        return float("inf"), problems

    stored = compose(records, ledger["delta"])
    for name in ACCOUNTANTS:
        said, found = ledger["epsilon"].get(name), stored["epsilon"][name]
        if not isinstance(said, (int, float)) or abs(said - found) > TOLERANCE * max(1.0, found):
            problems.append(f"it says epsilon ({name}) = {said}, its records come to {found:.6g}")
    problems += odometer_problems(ledger)
    if listed(ledger["stages"]) != listed(stored["stages"]):
        problems.append("its table of stages does not list the records it holds: one was added or trimmed")
    if ledger["accountant"] not in ACCOUNTANTS or ledger["adjacency"] not in RELATIONS:
        problems.append(f"accountant={ledger['accountant']!r}, adjacency={ledger['adjacency']!r}: unknown")
        return float("inf"), problems
    events = [event_from_json(record["event"]) for record in records]
    spent = epsilon(events, delta, ledger["accountant"], stored["adjacency"])
    at_its_own = stored["epsilon"][ledger["accountant"]]
    for what, bound, found, at in (
        ("its own target", ledger["target"], at_its_own, ledger["delta"]),
        ("--epsilon", limit, spent, delta),
    ):
        if bound is not None and not found <= bound:
            problems.append(f"epsilon={found:.4f} at delta={at:.3g} exceeds {what} {bound:g}")
    return spent, problems


def odometer_problems(ledger: Mapping) -> list[str]:
    """What does not hold in the line of everything ever opened, which is computed again from what the ledger lists."""
    said = ledger["odometer"]
    try:
        validated(OdometerLine, said)
        others = [{"id": None, "event": event} for event in said["others"]]
        found = odometer_line(ledger["records"], others, ledger["delta"], said["dataset_id"], said["head"])
        problems = [
            f"its odometer says {key} = {said[key]}, what it lists makes {found[key]:.6g}"
            for key in ("charges", "epsilon")
            if not abs(said[key] - found[key]) <= TOLERANCE * max(1.0, found[key])
        ]
        if said["complete"] is not found["complete"] or not (said["head"] is None or HEAD.fullmatch(said["head"])):
            problems.append("its odometer says complete without the head of a journal, or has no such head")
    except (ValueError, BudgetError) as error:
        return [f"its odometer cannot be read ({error})"]
    if said["dataset_id"] not in {record["dataset_id"] for record in ledger["records"]} and ledger["records"]:
        problems.append(f"its odometer is of {said['dataset_id']!r}, of which it holds no record")
    return problems


def malformed(ledger: Mapping) -> list[str]:
    """Why this has not the form of a ledger: nothing, or one sentence."""
    try:
        validated(Ledger, ledger)
    except ValueError as error:
        return [f"it has not the form of a ledger ({error})"]
    return []


def listed(stages: Mapping) -> dict[str, list[str]]:
    """The record ids of each stage that has any. An older version's ledger may lack a stage that is switched off."""
    return {name: entry["records"] for name, entry in stages.items() if entry["records"]}


def record_problems(place: str, record: object) -> list[str]:
    """The reasons not to trust a record, one sentence each. place: its name until its id is known."""
    if isinstance(record, dict) and not RECORD_ID.fullmatch(str(record.get("id"))):
        return [f"{place} has no id of 32 hexadecimal digits"]
    try:
        validated(Record, record)
    except ValueError as error:
        return [f"{place} is not a whole record ({error})"]
    assert isinstance(record, dict)
    name = f"record {record['id'][:8]}"
    problems = []
    if record["stage"] not in QUERIES:
        problems.append(f"{name} is of stage {record['stage']!r}, which is not a query")
    if record["adjacency"] not in RELATIONS:
        problems.append(f"{name} has adjacency {record['adjacency']!r}, which is unknown")
    grouped = record["unit"] == UNITS[GROUP]
    if record["unit"] not in UNITS.values() or grouped != ("group_weight" in record) or (grouped and "claim" in record):
        problems.append(f"{name} has the unit {record['unit']!r}, which is unknown or does not fit what else it says")
    if record["noise_source"] != SECRET:
        problems.append(
            f"{name} ({record['stage']}) has noise that can be replayed ({record['noise_source']}): it protects nobody"
        )
    try:
        event_from_json(record["event"])
    except BudgetError as error:
        problems.append(f"{name} ({record['stage']}): {error}")
    return problems


def lock_problems(ledger: Mapping, ledger_path: Path, lock: Path) -> list[str]:
    """What contradicts the ledger in `dvc.lock`: its md5, and query stages that ran but have no record in it."""
    try:
        outs = lock_outs(lock)
    except (OSError, ValueError) as error:
        return [f"{lock} cannot be read ({error})"]
    problems = []
    md5 = outs.get(ledger_path.name)
    if md5 is None:
        problems.append(f"{lock} knows no {ledger_path.name}: the pipeline that wrote it never finished (`dvc repro`)")
    elif md5 != md5_of(ledger_path.read_bytes()):
        problems.append(
            f"{lock} has another md5 for {ledger_path.name}: one of the two was edited, or belongs to another run"
        )
    recorded = {record.get("stage") for record in ledger["records"]}  # a damaged record may have none
    for path, md5 in outs.items():
        stage = path.rsplit("/", 1)[-1]
        unrecorded = path.startswith("artifacts/") and stage in QUERIES and stage not in recorded
        if unrecorded and md5 != empty_artifact_md5(stage):
            problems.append(
                f"stage {stage} ran (it is in {lock}), but the ledger holds no record of it: a record was trimmed"
            )
    return problems


@dataclass(frozen=True, kw_only=True)
class LockOut:
    """What `dvc.lock` says of a file or a folder that a stage wrote."""

    path: str
    md5: str


@dataclass(frozen=True, kw_only=True)
class LockStage:
    outs: tuple[LockOut, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Lock:
    """The part of `dvc.lock` that is read."""

    stages: dict[str, LockStage]


def lock_outs(lock: Path) -> dict[str, str]:
    """Path -> md5 of everything that `dvc.lock` lists as written. Raises OSError or ValueError where it is no lock."""
    stages = validated(Lock, read_yaml(lock)).stages.values()
    return {out.path: out.md5 for stage in stages for out in stage.outs}


def empty_artifact_md5(stage: str) -> str:
    """DVC's hash of the artifact of a stage that is switched off."""
    return folder_md5({"privacy.json": md5_of(as_text(empty_content(stage)).encode())})


def md5_of(content: bytes) -> str:
    """DVC's hash of a file."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def folder_md5(files: Mapping[str, str]) -> str:
    """DVC 3's hash of a folder: md5 over the path and the md5 of each file, and ".dir"."""
    entries = [{"md5": md5, "relpath": name} for name, md5 in sorted(files.items())]
    return md5_of(json.dumps(entries, sort_keys=True).encode()) + ".dir"
