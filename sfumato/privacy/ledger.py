"""The ledger: every charge behind a release, composed and checked from git alone.

It trusts no stored number: it computes epsilon again from the records' mechanisms and compares.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from dp_accounting import DpEvent

from sfumato.artifacts import as_text, empty_content
from sfumato.digest import digest_of
from sfumato.errors import BudgetError
from sfumato.pipeline import QUERIES
from sfumato.privacy.accountant import ACCOUNTANTS, RELATIONS, epsilon, shares_of_rdp
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, SECRET, ZERO_OUT_ONE, event_from_json

SCHEMA = 3
KEYS = {
    "schema",
    "recipe",
    "accountant",
    "adjacency",
    "delta",
    "size_hint",
    "target",
    "epsilon",
    "stages",
    "records",
    "odometer",
    "digest",
}
RECORD_KEYS = {
    "id",
    "stage",
    "dataset_id",
    "data_version",
    "unit",
    "adjacency",
    "event",
    "released",
    "sensitivity",
    "noise_source",
    "plan",
    "versions",
    "time",
}
RECORD_ID = re.compile("[0-9a-f]{32}")  # it also names a directory
TOLERANCE = 1e-6  # relative, between stored and recomputed epsilon


def compose(records: Sequence[dict], delta: float) -> dict:
    """The cost of the records: `epsilon` by every accountant; `stages`, each one's own epsilon and share of the RDP."""
    by_stage: dict[str, list[DpEvent]] = {name: [] for name in QUERIES}
    for record in records:
        by_stage[record["stage"]].append(event_from_json(record["event"]))
    # One record under add-or-remove limits the whole to it. Under either relation a Gaussian sum costs the same.
    adjacencies = {record["adjacency"] for record in records}
    adjacency = ZERO_OUT_ONE if adjacencies == {ZERO_OUT_ONE} else ADD_OR_REMOVE_ONE
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


def build_ledger(budget: Mapping, records: Mapping[str, dict], odometer: Sequence[DpEvent]) -> dict:
    """The ledger of a release. budget: the plan's; odometer: every charge opened on the dataset, aborted ones too."""
    delta = budget["delta"]
    rows = [records[key] for key in sorted(records)]
    composed = compose(rows, delta)
    ledger = {
        "schema": SCHEMA,
        "recipe": budget["recipe"],
        "accountant": budget["accountant"],
        "adjacency": composed["adjacency"],
        "delta": delta,
        "size_hint": budget["size_hint"],
        "target": budget["target"],
        "epsilon": composed["epsilon"],
        "stages": composed["stages"],
        "records": rows,
        "odometer": {"charges": len(odometer), "epsilon": epsilon(odometer, delta)},
    }
    return {**ledger, "digest": digest_of(ledger)}


def ledger_text(ledger: Mapping) -> str:
    return json.dumps(ledger, indent=1, sort_keys=True, allow_nan=False) + "\n"


def refuse_constant(name: str) -> float:
    raise ValueError(f"it holds {name}")


def read_ledger(path: Path) -> dict:
    """Read a ledger. Raises BudgetError where the file is missing or not a whole ledger."""
    try:
        ledger = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    except FileNotFoundError as error:
        raise BudgetError(f"{path} does not exist: run `stage ledger write` (or `dvc repro`)") from error
    except (OSError, ValueError, RecursionError) as error:
        raise BudgetError(
            f"{path} is truncated or not JSON ({error}): restore it from git, or run `stage ledger write`"
        ) from error
    if not isinstance(ledger, dict) or set(ledger) != KEYS:
        found = set(ledger) if isinstance(ledger, dict) else set()
        raise BudgetError(f"{path} is not a ledger: missing {sorted(KEYS - found)}, unknown {sorted(found - KEYS)}")
    if ledger["schema"] != SCHEMA or not isinstance(ledger["records"], list):
        raise BudgetError(
            f"{path} has schema {ledger['schema']!r}, this version reads {SCHEMA}: "
            "run `stage ledger write` (or `dvc repro`)"
        )
    return ledger


def by_id(ledger: Mapping) -> dict[str, dict]:
    """The records of a ledger by id. It skips records without an id: `check_ledger` reports these."""
    return {
        record["id"]: record
        for record in ledger["records"]
        if isinstance(record, dict) and isinstance(record.get("id"), str)
    }


def check_ledger(ledger: Mapping, *, limit: float | None = None, delta: float | None = None) -> tuple[float, list[str]]:
    """Compute epsilon again from the records, and list every reason why the ledger does not hold.

    limit: the largest epsilon allowed, beside the ledger's own target; delta: by default the ledger's.
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
    if problems:
        return float("inf"), problems

    stored = compose(records, ledger["delta"])
    for name in ACCOUNTANTS:
        said, found = ledger["epsilon"].get(name), stored["epsilon"][name]
        if not isinstance(said, (int, float)) or abs(said - found) > TOLERANCE * max(1.0, found):
            problems.append(f"it says epsilon ({name}) = {said}, its records come to {found:.6g}")
    if listed(ledger["stages"]) != listed(stored["stages"]):
        problems.append("its table of stages does not list the records it holds: one was added or trimmed")
    if ledger["accountant"] not in ACCOUNTANTS or ledger["adjacency"] not in RELATIONS:
        return float("inf"), [
            *problems,
            f"accountant={ledger['accountant']!r}, adjacency={ledger['adjacency']!r}: unknown",
        ]
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


def malformed(ledger: Mapping) -> list[str]:
    """The entries of a ledger that are not of their kind, one sentence each."""
    found = []
    for key, kind in (("epsilon", dict), ("stages", dict), ("odometer", dict), ("records", list), ("digest", str)):
        if not isinstance(ledger[key], kind):
            found.append(f"its entry {key!r} is not a {kind.__name__}")
    for key in ("target", "delta"):
        value = ledger[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            found.append(f"its {key} is {value!r}, which is not a positive number")
    return found


def listed(stages: Mapping) -> dict[str, list[str]]:
    """The record ids of each stage that has any. An older version's ledger may lack a stage that is switched off."""
    return {
        name: entry["records"] for name, entry in stages.items() if isinstance(entry, dict) and entry.get("records")
    }


def record_problems(place: str, record: object) -> list[str]:
    """The reasons not to trust a record, one sentence each. place: its name until its id is known."""
    if not isinstance(record, dict) or set(record) != RECORD_KEYS:
        return [f"{place} is not a whole record"]
    if not isinstance(record["id"], str) or not RECORD_ID.fullmatch(record["id"]):
        return [f"{place} has no id of 32 hexadecimal digits"]
    name = f"record {record['id'][:8]}"
    problems = []
    if record["stage"] not in QUERIES:
        problems.append(f"{name} is of stage {record['stage']!r}, which is not a query")
    if record["adjacency"] not in RELATIONS:
        problems.append(f"{name} has adjacency {record['adjacency']!r}, which is unknown")
    if record["noise_source"] != SECRET:
        problems.append(
            f"{name} ({record['stage']}) has noise that can be replayed ({record['noise_source']}): it protects nobody"
        )
    try:
        event_from_json(record["event"])
    except (BudgetError, RecursionError) as error:
        problems.append(f"{name} ({record['stage']}): {error}")
    return problems


def lock_problems(ledger: Mapping, ledger_path: Path, lock: Path) -> list[str]:
    """What contradicts the ledger in `dvc.lock`: its md5, and query stages that ran but have no record in it."""
    try:
        stages = yaml.safe_load(lock.read_text(encoding="utf-8"))["stages"]
        outs = {out["path"]: (name, out["md5"]) for name, stage in stages.items() for out in stage.get("outs", ())}
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        return [f"{lock} cannot be read ({error!r})"]
    problems = []
    _, md5 = outs.get(ledger_path.name, ("", None))
    if md5 is None:
        problems.append(f"{lock} knows no {ledger_path.name}: the pipeline that wrote it never finished (`dvc repro`)")
    elif md5 != hashlib.md5(ledger_path.read_bytes(), usedforsecurity=False).hexdigest():
        problems.append(
            f"{lock} has another md5 for {ledger_path.name}: one of the two was edited, or belongs to another run"
        )
    recorded = {record["stage"] for record in ledger["records"]}
    for path, (_, md5) in outs.items():
        stage = path.rsplit("/", 1)[-1]
        if (
            path.startswith("artifacts/")
            and stage in QUERIES
            and stage not in recorded
            and md5 != empty_artifact_md5(stage)
        ):
            problems.append(
                f"stage {stage} ran (it is in {lock}), but the ledger holds no record of it: a record was trimmed"
            )
    return problems


def empty_artifact_md5(stage: str) -> str:
    """DVC's hash of the artifact of a stage that is switched off."""
    inner = hashlib.md5(as_text(empty_content(stage)).encode(), usedforsecurity=False).hexdigest()
    listing = json.dumps([{"md5": inner, "relpath": "privacy.json"}], sort_keys=True)
    return hashlib.md5(listing.encode(), usedforsecurity=False).hexdigest() + ".dir"
