"""What was released before, which a plan keeps, and what a plan would spend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.data.store import Card
from sfumato.errors import UNREADABLE
from sfumato.privacy.ledger import by_id
from sfumato.privacy.odometer import ABANDON, CLOSE, Odometer
from sfumato.privacy.record import is_record
from sfumato.privacy.schema4 import as_now
from sfumato.settings.params import Params
from sfumato.settings.stages import QUERIES, STAGES
from sfumato.storage.documents import read_json, read_yaml

if TYPE_CHECKING:
    from sfumato.planning.resolve import Plan


def stages_before(name: str, params: Params) -> tuple[str, ...]:
    """The stages that are switched on and that `name` reads, directly or through others, in the order of the table."""
    reads = getattr(params, name).reads
    direct = [other for other in STAGES[name].upstream if params.runs(other) and reads(other)]
    found = {*direct, *(far for other in direct for far in stages_before(other, params))}
    return tuple(other for other in STAGES if other in found)


def settings_for_ever(params: Params) -> dict[str, list[str]]:
    """The free stages that queries read, directly or through others, with those queries.

    A change of their settings after the release makes these spend again.
    """
    queries = {name: stages_before(name, params) for name in QUERIES if params.runs(name)}
    readers = {name: [q for q, before in queries.items() if name in before] for name, s in STAGES.items() if s.free}
    return {name: found for name, found in readers.items() if found}


def released_records(card: Card, odometer: Odometer, artifacts: Path, ledger: Path) -> list[dict]:
    """The records of what was released on these images, or left open by a kill; of two, the later one is kept.

    They come from the committed ledger, which a clone has, from the odometer, which outlives a lost cache, and from the
    artifacts. A record that cannot be read is skipped: the odometer still refuses to spend on what it covers.
    """
    runs = [run for run in odometer.charges() if run.end != ABANDON]  # the open ones first: a closed one is kept
    runs.sort(key=lambda run: run.end == CLOSE)
    found = [*records_in(ledger), *(run.record if run.end else {**run.record, "open": True} for run in runs)]
    for name in QUERIES:
        records = records_in(artifacts / name / "privacy.json")
        found += [record for record in records if record.get("stage") == name]
    version = card.dataset_id, card.version
    return [r for r in found if is_record(r) and (r["dataset_id"], r["data_version"]) == version]


def records_in(file: Path) -> list[dict]:
    """What a ledger or a `privacy.json` holds; nothing if it cannot be read."""
    try:
        return list(by_id(read_json(file)).values())
    except UNREADABLE:
        return []


def repeat_counts(params: Params, plans: Mapping[str, tuple[str, ...]], released: Sequence[dict]) -> dict[str, int]:
    """How often each query was, or will be, paid for again under its plan.

    The number in privacy.spend_again is compared with what was released, so a wish is granted once. It also reaches the
    queries that depend on a named one, because their inputs will change.
    """
    wishes, found = params.privacy.spend_again, {}
    for name, same in plans.items():
        done = [record["again"] for record in released if record.get("plan") in same]
        wished = sum(wishes.get(other, 0) for other in (name, *stages_before(name, params)))
        found[name] = max(done) + (wished > max(done)) if done else wished  # a first release fulfils the wish
    return found


def kept_releases(
    plans: Mapping[str, tuple[str, ...]], repeats: Mapping[str, int], released: Sequence[dict]
) -> dict[str, dict]:
    """The newest release of each query under the same plan, which it keeps.

    plans: by query, the digests that records of the same plan hold; repeats: as `repeat_counts` returns them.
    """
    return {
        name: found[-1]
        for name, same in plans.items()
        if (found := [r for r in released if (r["stage"], r["again"]) == (name, repeats[name]) and r["plan"] in same])
    }


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What becomes of one query under a plan."""

    stage: str
    done: str | None  # the charge that released it
    cause: str | None  # the stage whose change makes it spend
    left_open: bool  # by a kill: it resumes at no further cost


def spending_of(made: Plan, out: Path) -> list[Spending]:
    """For each query: already released, or to be spent, and why. out: the folder of the plan so far."""
    changed: dict[str, str] = {}  # stage -> the stage whose change reaches it
    found = []
    for name, stage in STAGES.items():
        kept = made.kept.get(name, {})
        done = kept["id"] if kept and not kept.get("open") else None
        cause = next((changed[other] for other in stage.upstream if other in changed), None)
        if not holds(out / f"{name}.yaml", made.files[name]) or (name in made.mechanisms and cause is None):
            cause = name
        if done:
            cause = None
        if cause:
            changed[name] = cause
        if name in made.mechanisms:
            found.append(Spending(stage=name, done=done, cause=cause, left_open=bool(kept.get("open"))))
    return found


def stages_to_run(made: Plan, spending: Sequence[Spending], out: Path, artifacts: Path) -> set[str]:
    """The stages whose settings or inputs changed or whose artifact is missing. Released queries are put back at once.

    out: the folder of the plan so far; artifacts: that of all.
    """
    done, found = {entry.stage for entry in spending if entry.done}, set[str]()
    for name, stage in STAGES.items():
        there = name == "evaluate" or (artifacts / name).is_dir()  # evaluate leaves no artifact
        same = there and holds(out / f"{name}.yaml", made.files[name]) and not found & {*stage.upstream}
        if name not in done and not same:
            found.add(name)
    return found


def holds(file: Path, content: dict) -> bool:
    """Whether a resolved file exists and means this, in whichever version's form."""
    try:
        return as_now(read_yaml(file)) == content
    except (OSError, ValueError, KeyError, TypeError):
        return False
