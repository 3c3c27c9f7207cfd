"""Check a ledger from git, without data.

Stored numbers are not trusted: epsilon is recomputed from the records.
"""

import math
import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from sfumato.errors import BudgetError, ConfigError, SfumatoError
from sfumato.privacy.accountant import ACCOUNTANTS, checked_delta
from sfumato.privacy.events import UNITS
from sfumato.privacy.ledger import Ledger, by_id, compose, odometer_line, read_ledger, spent_on_one
from sfumato.privacy.opinions import Opinion, disagreements, kept_opinions, own_opinions
from sfumato.privacy.record import record_problems
from sfumato.privacy.resolved import read_stage_plan
from sfumato.settings.stage import ARTIFACTS, LOCK, PLAN, PUBLIC
from sfumato.settings.stages import QUERIES, STAGES
from sfumato.storage.artifacts import Artifact, as_text, empty_content, read_artifact
from sfumato.storage.digest import digest_of, md5_of, md5_of_file, md5_of_listing
from sfumato.storage.documents import MergeConflict, quoted, read_yaml, validated
from sfumato.storage.records import Records, widest_declaration

TOLERANCE = 1e-6  # Relative tolerance between stored and recomputed epsilon
# A ledger belongs to a project if its folder contains one of these
PROJECT_FILES = (str(LOCK), "dvc.yaml", "params.yaml", ".dvc")


class LedgerError(BudgetError):
    """Raised for an invalid ledger. problems: all reasons why it is invalid, one sentence each."""

    def __init__(self, path: Path, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{path} is not valid: " + "; ".join(self.problems))


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A valid ledger.

    epsilon: ε at `delta`;
    opinions: results of the accountants, by name;
    epsilon_by_set: mapping from each dataset to ε for a person in this dataset. Empty unless the
    owners declared that no person is in two datasets.
    """

    ledger: dict
    epsilon: float
    delta: float
    opinions: Mapping[str, Opinion]
    epsilon_by_set: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Requirements on a ledger, in addition to the target, which is the ledger's own limit on ε.

    limit: largest ε to accept;
    delta: δ at which ε is computed, by default the ledger's;
    unit: required unit of privacy, "image" or "group".

    With None for `limit` or `unit`, there is no such requirement. Raises ConfigError for an ε or δ
    that is not positive and finite, or for an unknown unit.
    """

    limit: float | None = None
    delta: float | None = None
    unit: str | None = None

    def __post_init__(self) -> None:
        for option, value in (("epsilon", self.limit), ("delta", self.delta)):
            if value is not None and not 0 < value < float("inf"):
                text = f"{{option.{option}}} {{value:g}} is not a bound: expected a positive number"
                raise ConfigError(text, option=option, value=value)
        if self.unit not in (None, *UNITS):
            text = "{option.unit} {unit} is not a unit: expected one of {units}"
            raise ConfigError(text, option="unit", unit=self.unit, units=", ".join(UNITS))


def verify(
    path: Path,
    bound: Bound = Bound(),
    *,
    artifacts: bool = False,
    ledger_only: bool = False,
    all_opinions: bool = False,
    state: Path | None = None,
) -> Verified:
    """Verify a ledger and, on request, the artifacts of its project. Needs no images.

    artifacts: also check the files of all artifacts;
    ledger_only: do not compare the ledger with `dvc.lock`, for a ledger that was received without
    its project;
    all_opinions: also compute ε by Opacus's two accountants, which takes seconds;
    state: state directory, in which Opacus's results are cached.

    Raises LedgerError with every reason, and ConfigError if an argument cannot be used, for example
    `ledger_only` for a ledger in a project.
    """
    project_files = [
        path.parent / name for name in PROJECT_FILES if os.path.lexists(path.parent / name)
    ]
    if ledger_only and artifacts:
        raise ConfigError(
            "{option.ledger_only} checks only the ledger, but {option.artifacts} also checks the "
            "files of its project: use only one of the two options",
            option="ledger_only",
        )
    if ledger_only and project_files:
        raise ConfigError(
            "{path} belongs to a project, because {file} exists: leave out {option.ledger_only}, "
            "which is for a ledger without its project",
            option="ledger_only",
            file=project_files[0],
            path=path,
        )
    if all_opinions and find_spec("opacus") is None:
        raise ConfigError(
            "{option.opinions} all requires Opacus, which is not installed: run `pip install "
            "opacus`, or leave out the option",
            option="opinions",
        )
    ledger = read_ledger(path)
    spent, problems = check_ledger(ledger, limit=bound.limit, delta=bound.delta, unit=bound.unit)
    if not ledger_only:
        problems += lock_problems(ledger, path, path.parent / LOCK)
    if artifacts:
        problems += artifact_problems(ledger, path.parent)
    if problems:
        raise LedgerError(path, problems)
    at = bound.delta or ledger["delta"]
    by = ledger["accountant"]
    records = Records.of_ledger(ledger)
    parts = records.of_one_person()
    dearest = max(parts.values(), key=lambda part: compose(part, at)["epsilon"]["rdp"])
    charges = [*dearest.values()]
    if all_opinions:
        # Computed only for a valid ledger, because this takes seconds
        opinions = kept_opinions(charges, at, by, state)
    else:
        opinions = own_opinions(charges, at, by)
    if problems := disagreements(opinions, by):
        raise LedgerError(path, problems)
    each = {
        name: compose(part, at, by)["epsilon"][by] for name, part in parts.items() if records.owners
    }
    return Verified(ledger=ledger, epsilon=spent, delta=at, opinions=opinions, epsilon_by_set=each)


def check_ledger(
    ledger: Mapping,
    *,
    limit: float | None = None,
    delta: float | None = None,
    unit: str | None = None,
) -> tuple[float, list[str]]:
    """Recompute epsilon from the records, and list every reason why the ledger is invalid.

    Args:
        ledger: Content of a ledger, from `read_ledger`.
        limit: Largest epsilon to accept. The ledger's own target is checked in any case.
        delta: δ of the result. The default is the ledger's δ.
        unit: "image" or "group", to require this unit of privacy. By default, both are accepted.

    Returns:
        (epsilon by the ledger's accountant at `delta`, list of reasons).
    """
    if problems := malformed(ledger):
        return math.inf, problems
    content = {key: value for key, value in ledger.items() if key != "digest"}
    if digest_of(content) != ledger["digest"]:
        problems.append("its digest does not match its content: it was edited")
    if delta is None:
        delta = ledger["delta"]
    accountant = ledger["accountant"]
    try:
        checked_delta(ledger["delta"], ledger["size_hint"])
        checked_delta(delta, ledger["size_hint"])
    except ConfigError as error:
        return math.inf, [*problems, str(error)]
    if accountant not in ACCOUNTANTS:
        problems.append(
            f"accountant={accountant!r} is unknown: expected one of {', '.join(ACCOUNTANTS)}"
        )
    problems += mistakes_in_records(ledger)
    if not problems and len(by_id(ledger)) < len(ledger["records"]):
        problems.append("it contains a record twice")
    if problems:
        return math.inf, problems
    records = Records.of_ledger(ledger)
    if problem := records.composition_problem():
        return math.inf, [problem]
    if unit is not None and records and records.units != [UNITS[unit]]:
        return math.inf, [f"its privacy unit is {records.units[0]}, expected {UNITS[unit]}"]
    stored = compose(records, ledger["delta"], accountant)
    problems += stated_problems(ledger, stored)
    problems += odometer_problems(ledger)
    spent = spent_on_one(records, delta, accountant, stored["adjacency"])
    for name, bound, cost, at in (
        ("the ledger's target", ledger["target"], stored["epsilon"][accountant], ledger["delta"]),
        ("the limit", limit, spent, delta),
    ):
        if bound is not None and not cost <= bound:
            problems.append(f"epsilon={cost:.4f} at delta={at:.3g} exceeds {name} {bound:g}")
    return spent, problems


def stated_problems(ledger: Mapping, computed: Mapping) -> list[str]:
    """List the statements of a ledger that contradict its records.

    computed: result of `compose`.
    """
    problems = []
    if ledger["adjacency"] != computed["adjacency"]:
        problems.append(
            f"its adjacency is {ledger['adjacency']!r}, but its records require "
            f"{computed['adjacency']!r}"
        )
    for name, cost in computed["epsilon"].items():
        stated = ledger["epsilon"].get(name, math.nan)
        if differs(stated, cost):
            problems.append(f"its epsilon ({name}) is {stated}, but its records cost {cost:.6g}")
    if unknown := sorted(ledger["epsilon"].keys() - computed["epsilon"].keys()):
        problems.append(
            f"it states an epsilon for an unknown accountant ({', '.join(unknown)}): it was edited"
        )
    if listed(ledger["stages"]) != listed(computed["stages"]):
        problems.append(
            "its table of stages does not list exactly the ledger's records: a record was added or "
            "removed"
        )
    for name, line in ledger["stages"].items():
        # An earlier version may have had a stage that no longer exists. It has no records, so it
        # must cost nothing.
        of_records = computed["stages"].get(name, {"epsilon": 0.0, "share": 0.0})
        problems += [
            f"it states {key}={line[key]} for {name}, but its records give {of_records[key]:.6g}"
            for key in ("epsilon", "share")
            if differs(line[key], of_records[key])
        ]
    return problems


def differs(stated: float, computed: float) -> bool:
    """Return whether a stated number differs from the computed one by more than rounding.

    NaN always differs.
    """
    return not abs(stated - computed) <= TOLERANCE * max(1.0, computed)


def odometer_problems(ledger: Mapping) -> list[str]:
    """Recompute the ledger's entry about the odometer, and list all errors in this entry.

    The entry is recomputed from the ledger's records and from the charges in its list `others`.
    """
    entry = ledger["odometer"]
    try:
        others = [{"id": None, "event": event} for event in entry["others"]]
        line = odometer_line(
            ledger["records"],
            others,
            ledger["delta"],
            entry["dataset_id"],
            entry["head"],
            ledger["accountant"],
        )
    except BudgetError as error:
        return [f"its odometer cannot be read ({error})"]
    problems = [
        f"its odometer states {key}={entry[key]}, but the listed charges give {line[key]:.6g}"
        for key in ("charges", "epsilon")
        if differs(entry[key], line[key])
    ]
    head = entry["head"]
    if entry["complete"] and head is None:
        problems.append(
            "its odometer is marked as complete, but `head`, the hash of the journal's newest "
            "entry, is missing"
        )
    if not entry["complete"] and head is not None:
        problems.append(
            "its odometer is marked as incomplete, but contains `head`, the hash of a journal's "
            "newest entry"
        )
    if head is not None and not re.fullmatch("[0-9a-f]{64}", head):
        problems.append(
            f"its odometer's head is {head!r}: expected 64 hexadecimal digits in lower case"
        )
    if (
        entry["dataset_id"] not in {record["dataset_id"] for record in ledger["records"]}
        and ledger["records"]
    ):
        problems.append(
            f"its odometer is for {entry['dataset_id']!r}, but the ledger contains no record of "
            "that dataset"
        )
    return problems


def malformed(ledger: Mapping) -> list[str]:
    """List the first error in the form of a ledger, as one sentence. The list is empty if the form
    is correct.
    """
    try:
        validated(Ledger, ledger)
    except ValueError as error:
        return [f"it does not have the form of a ledger ({error})"]
    return []


def mistakes_in_records(ledger: Mapping) -> list[str]:
    """List the errors in the records of a ledger, one sentence each."""
    return [
        problem
        for number, record in enumerate(ledger["records"])
        for problem in record_problems(f"record {number}", record)
    ]


def listed(stages: Mapping) -> dict[str, list[str]]:
    """Return the ids of the records by stage.

    Stages without records are left out, because older ledgers may not list such stages.
    """
    return {name: entry["records"] for name, entry in stages.items() if entry["records"]}


@dataclass(frozen=True, kw_only=True)
class LockedFile:
    """A file or folder that `dvc.lock` lists.

    hash: name of the hash algorithm, as DVC writes it.
    """

    path: str
    md5: str = ""
    hash: str = ""

    @property
    def place(self) -> str:
        """Normalized path: `./artifacts//count` becomes `artifacts/count`."""
        return posixpath.normpath(self.path)


@dataclass(frozen=True, kw_only=True)
class LockedStage:
    deps: tuple[LockedFile, ...] = ()
    outs: tuple[LockedFile, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LockFile:
    """The form of `dvc.lock`."""

    schema: Literal["2.0"]
    stages: dict[str, LockedStage]


def lock_problems(ledger: Mapping, ledger_path: Path, lock: Path) -> list[str]:
    """List the contradictions between `dvc.lock` and the ledger.

    Examples are a different md5, or a query stage that ran without a record in the ledger.
    """
    for path in (ledger_path, lock):
        if path.is_symlink():
            return [f"{path} is a link: commit the file itself, so that reviewers see its content"]
    try:
        stages = read_lock(lock)
    except FileNotFoundError:
        return [
            f"{lock} does not exist: restore it from git, or run `dvc repro`. To check a ledger "
            "without its project, use `stage ledger check --ledger-only`"
        ]
    except MergeConflict:
        return [
            f"{lock} contains both sides of a merge conflict: take one side of this file and of "
            f"{ledger_path} (`git checkout HEAD -- {quoted(ledger_path)} {quoted(lock)}` takes "
            "yours), and then run `dvc repro`"
        ]
    except (OSError, ValueError) as error:
        return [f"{lock} cannot be read ({error})"]
    name = ledger_path.name
    outs = [out for stage in stages for out in stage.outs]
    inputs = [
        file for stage in stages if name in {out.place for out in stage.outs} for file in stage.deps
    ]
    query_of = {str(ARTIFACTS / stage): stage for stage in QUERIES}
    problems = []
    hashes: dict[str, set[str]] = defaultdict(set)  # all md5 values of each path
    for file in (*outs, *inputs):
        hashes[file.place].add(file.md5)
        if (file.place == name or file.place in query_of) and (file.hash != "md5" or not file.md5):
            problems.append(f"{lock} contains no md5 of {file.place}: run `dvc repro`")
    ledger_outs = [out for out in outs if out.place == name]
    if not ledger_outs:
        problems.append(
            f"{lock} does not list {name}: the pipeline never finished. Run `dvc repro`"
        )
    elif len(ledger_outs) > 1:
        problems.append(f"{lock} lists {name} as written by two stages: an entry was added")
    elif ledger_outs[0].md5 != md5_of_file(ledger_path):
        problems.append(
            f"{name} has a different md5 than {lock} states: one of the two files was edited, or "
            "they belong to different runs"
        )
    for place in sorted({out.place for out in outs if len(hashes[out.place]) > 1}):
        stale = (
            f"{name} was written before {place} changed (run `dvc repro`), or an entry was edited"
        )
        problems.append(f"{lock} has two md5 values for {place}: {stale}")
    # A damaged record may have no stage.
    recorded = {record.get("stage") for record in ledger["records"]}
    for place, stage in query_of.items():
        if stage not in recorded and hashes[place] - {empty_artifact_md5(stage)}:
            problems.append(
                f"stage {stage} ran, according to {lock}, but the ledger contains no record of "
                "this stage: a record was removed"
            )
    return problems


def artifact_problems(ledger: Mapping, project: Path) -> list[str]:
    """List the errors in artifacts on disk: in their bytes, names and records.

    An artifact of a query contains the record of its own charge. Every artifact contains the
    records of all its inputs.
    """
    folder = project / ARTIFACTS
    paths = {path.parent for path in folder.glob("*/privacy.json")}
    if not paths:
        return [f"{folder} contains no artifact to verify: run `dvc checkout` or `dvc pull`"]
    # If the lock file cannot be read, `lock_problems` reports it.
    with suppress(OSError, ValueError):
        outs = [Path(out.place) for stage in read_lock(project / LOCK) for out in stage.outs]
        # DVC keeps the entries of stages that no longer exist.
        paths |= {
            project / path for path in outs if path.parent == ARTIFACTS and path.name in STAGES
        }
    if (project / PUBLIC / "privacy.json").is_file():
        paths.add(project / PUBLIC)  # the public images come from an earlier release
    problems = []
    artifacts = dict[str, Artifact]()
    listed_records = by_id(ledger)
    for path in sorted(paths):
        try:
            artifacts[path.name] = read_artifact(path, path.name, allow_local=True)
        except SfumatoError as error:
            problems.append(str(error))
            continue
        unknown = [
            key
            for key, record in artifacts[path.name].records.items()
            if listed_records.get(key) != record
        ]
        problems += [
            f"{path} depends on charge {key[:8]}, but the ledger's record of this charge is "
            "missing or different"
            for key in unknown
        ]
    declared = widest_declaration(artifact.records for artifact in artifacts.values())
    if declared != tuple(ledger.get("apart", ())):
        problems.append(
            "the ledger and the artifacts declare different lists of datasets that share no person"
        )
    for name, artifact in artifacts.items():
        if name not in STAGES or not artifact.enabled:
            continue
        charged_stages = {
            record["stage"] for record in artifact.records.values() if isinstance(record, dict)
        }
        if name in QUERIES and name not in charged_stages:
            problems.append(
                f"{artifact.path} contains no record of its own charge: its privacy.json was edited"
            )
        try:
            settings = read_stage_plan(
                project / PLAN / f"{name}.yaml", name, extra="ignore"
            ).settings
        except SfumatoError as error:
            problems.append(str(error))
            continue
        for input_name in (
            input_name
            for input_name in STAGES[name].inputs
            if input_name in artifacts and settings.reads(input_name)
        ):
            if not artifacts[input_name].records.keys() <= artifact.records.keys():
                problems.append(
                    f"{artifact.path} lacks records of {input_name}, an input of this artifact: a "
                    "record was removed"
                )
    return problems


def read_lock(lock: Path) -> list[LockedStage]:
    """Return the stages in `dvc.lock`. These are the stages that DVC has run.

    Raises OSError or ValueError if `lock` cannot be read or does not have the form of `dvc.lock`.
    """
    return list(validated(LockFile, read_yaml(lock)).stages.values())


def empty_artifact_md5(stage: str) -> str:
    """Return DVC's hash of the artifact of a stage that is switched off."""
    return md5_of_listing({"privacy.json": md5_of(as_text(empty_content(stage)).encode())})
