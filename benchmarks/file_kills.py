"""Kill a command at every file event, or simulate a power cut: running it again must succeed.

    python benchmarks/file_kills.py
    python benchmarks/file_kills.py --commands count forget --every 10

For each command of CASES, a small project is prepared up to that command. Then the command runs
once for each of its file events, and is killed at this event. An event is one of these operations
in the project or its state directory: open a file for writing, write, flush, rename, remove, create
a folder, change a mode (`tests/file_faults.py`). Each kill leaves up to three states of the files:

- as they are;
- as after a power cut, if the disk has all creations, renames and removals of files, but only
  flushed contents;
- as after a power cut, if the disk has only what was flushed, names as well as contents.

In each state, the command is run again. It must succeed, or refuse because the release is already
kept. No charge may be made twice, and forgotten files must be gone. A power cut after the end of
the command must undo nothing. A state with the same files as at the previous event is not tried.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import kills
import yaml
from kills import NAME, Project, make_project

from sfumato.data.prepare import fingerprint, kept_fingerprint
from sfumato.data.sources.packed import UNPACKED
from sfumato.data.store import SENSITIVE, load_prepared, read_card
from sfumato.planning.forget import private_files
from sfumato.privacy.ledger import read_budget
from sfumato.privacy.odometer import CLOSE, LOCAL_USE
from sfumato.privacy.resolved import read_stage_plan
from sfumato.settings.stages import STAGES
from sfumato.storage.artifacts import read_artifact
from sfumato.storage.documents import read_json, read_yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import forked_stages
from faults import fault
from file_faults import EMPTIED, EVENTS, LOST

THE_END = "the end"
STATES = {"killed": "", "emptied": EMPTIED, "lost": LOST}
QUERIES = ("count", "frequency")
RELEASE = [name for name in STAGES if name != "evaluate"]
# folder of a killed process that was unpacking an archive
UNPACKED_BEFORE = f".{UNPACKED}.{2**30}-1.tmp"
# parts of names that differ by process, run or time
CHANGING = re.compile(r"\.\d+-\d+\.tmp|[0-9a-f]{32}|\d{19}")


@dataclass(frozen=True)
class Case:
    """A command to kill.

    words: the command; before: function that prepares a project for the command; check: function
    that raises AssertionError unless the command's results are complete.
    """

    words: str
    before: Callable[[Project], None]
    check: Callable[[Project], None]


def run_all(project: Project, *commands: str) -> None:
    for command in commands:
        code, said = project.run("stage", *command.split())
        assert code == 0, f"stage {command}: {said}"


def charged(project: Project) -> list[str]:
    """Return the stages of all charges. Raises AssertionError unless each charge was closed."""
    charges = project.odometer.charges()
    assert all(charge.end == CLOSE for charge in charges), charges
    return sorted(charge.record["stage"] for charge in charges)


# --- the commands ---------------------------------------------------------------------------------


def nothing_yet(project: Project) -> None:
    """Prepare nothing: the project is as `make_project` left it, without a state directory."""


def prepared_first(project: Project) -> None:
    assert charged(project) == [] and project.odometer.complete()
    card = read_card(project.home / "data/sensitive/card.json")
    assert kept_fingerprint(project.state, card) == fingerprint(
        load_prepared(project.state, card, SENSITIVE), (project.state / "keys" / NAME).read_bytes()
    )


def with_a_withdrawal(project: Project) -> None:
    """Run a project up to `count`, and then set a new version, as if a person had withdrawn."""
    run_all(project, "prepare sensitive", "prepare public", "plan", "count")
    key = project.state / "keys" / NAME
    shutil.copy(key, project.folder.with_name(f"{project.folder.name}.key"))
    params = project.home / "params.yaml"
    params.write_text(
        params.read_text(encoding="utf-8").replace("dataset_id:", "version: '2'\n  dataset_id:")
    )


def prepared_again(project: Project) -> None:
    assert charged(project) == ["count"]
    key = project.folder.with_name(f"{project.folder.name}.key").read_bytes()
    assert (project.state / "keys" / NAME).read_bytes() == key
    assert read_json(project.odometer.images / "card.json")["version"] == "2"
    withdrawn = [path for path in project.odometer.images.parent.glob(".*") if path.is_dir()]
    assert not withdrawn, withdrawn


def planned(project: Project) -> None:
    run_all(project, "prepare sensitive", "prepare public", "plan")


def counted(project: Project) -> None:
    assert charged(project) == ["count"]
    (charge,) = project.odometer.charges()
    for folder in (
        project.home / "artifacts/count",
        project.state / "runs" / charge.id / "released",
    ):
        assert charge.record["id"] in read_artifact(folder, "count").records


def released_twice(project: Project) -> None:
    """Make two releases by different plans. The second must replace the first in the ledger."""
    planned(project)
    run_all(project, *RELEASE, "ledger write")
    params = project.home / "params.yaml"
    own = yaml.safe_load(params.read_text(encoding="utf-8"))
    own["privacy"] |= {"spend_again": {"count": 1}, "lifetime_epsilon": "unlimited"}
    params.write_text(yaml.safe_dump(own, sort_keys=False), encoding="utf-8")
    run_all(project, "plan")
    for stage in (*QUERIES, "auxiliary", "synthesize"):
        shutil.rmtree(project.home / "artifacts" / stage)  # as DVC does before a stage
        run_all(project, stage)


def in_the_ledger(project: Project) -> None:
    assert charged(project) == sorted(2 * QUERIES)
    ledger = read_json(project.home / "ledger.json")
    records = {
        key
        for name in QUERIES
        for key in read_artifact(project.home / "artifacts" / name, name).records
    }
    assert {record["id"] for record in ledger["records"]} == records
    assert ledger["odometer"]["complete"] and ledger["odometer"]["charges"] == 2 * len(QUERIES)
    assert all((project.state / "runs" / run / "released").is_dir() for run in records)


def evaluated(project: Project) -> None:
    """Make a release, and an evaluation's files in the project and in the state directory."""
    planned(project)
    run_all(project, *RELEASE, "ledger write")
    (project.home / "evaluation").mkdir(exist_ok=True)
    for path in ("evaluation/numbers.csv", "metrics.json"):
        (project.home / path).write_text("numbers of real images")
    (project.state / "evaluations").mkdir(exist_ok=True)
    (project.state / "evaluations/one.json").write_text(f'{{"dataset": "{NAME}"}}')
    (project.state / UNPACKED_BEFORE).mkdir()
    (project.state / UNPACKED_BEFORE / "picture.png").write_bytes(b"real")


def gone(project: Project) -> None:
    assert charged(project) == sorted(QUERIES)
    left = [path for paths in private_files(project.state, NAME).values() for path in paths]
    others = [
        project.home / "evaluation",
        project.home / "metrics.json",
        project.state / UNPACKED_BEFORE,
    ]
    left += [path for path in others if path.exists()]
    assert not left, left
    assert project.odometer.entries()[-1]["kind"] == LOCAL_USE


def two_owners(project: Project) -> None:
    """Create an empty project beside two owners' projects, each with its own counts and means."""
    folder = project.folder
    for name in ("north", "south"):
        owner = make_project(
            folder.with_name(f"{folder.name}.{name}"), "frequency", "image", project.programs
        )
        params = owner.home / "params.yaml"
        params.write_text(
            params.read_text(encoding="utf-8").replace(f"dataset_id: {NAME}", f"dataset_id: {name}")
        )
        run_all(owner, "prepare sensitive", "prepare public", "plan", *QUERIES)
        for part in ("artifacts", "data"):
            shutil.copytree(owner.home / part, project.folder / name / part)
    shutil.rmtree(project.home)
    project.home.mkdir()


def merged(project: Project) -> None:
    assert not project.state.exists() or not (project.state / "odometer").exists()
    for name in QUERIES:
        assert len(read_artifact(project.home / "artifacts" / name, name).records) == 2 * (
            1 + QUERIES.index(name)
        )
    for name in STAGES:
        read_stage_plan(project.home / "artifacts/plan" / f"{name}.yaml", name)
    read_budget(project.home / "artifacts/plan/budget.json")
    assert read_yaml(project.home / "dvc.yaml")["stages"].keys() >= {
        "auxiliary",
        "synthesize",
        "ledger",
        "report",
    }
    for name in (".gitignore", ".gitattributes", ".github/workflows/ledger.yml"):
        assert (project.home / name).stat().st_size


CASES = {
    "prepare": Case("prepare sensitive", nothing_yet, prepared_first),
    "prepare again": Case("prepare sensitive", with_a_withdrawal, prepared_again),
    "count": Case("count", planned, counted),
    "ledger write": Case("ledger write", released_twice, in_the_ledger),
    "forget": Case(f"forget --dataset {NAME} --yes", evaluated, gone),
    "merge": Case("merge ../north ../south --different-people", two_owners, merged),
}


# --- the kills ------------------------------------------------------------------------------------


def begun(name: str, base: Path, programs: Path) -> tuple[Project, Path]:
    """Prepare a project for the command `name`. Returns the project and a copy of it."""
    project = make_project(base / name.replace(" ", "-"), "frequency", "image", programs)
    shutil.rmtree(project.home / ".git", ignore_errors=True)
    shutil.rmtree(project.state, ignore_errors=True)
    CASES[name].before(project)
    return project, project.keep("before")


def events_of(project: Project, kept: Path, case: Case) -> list[str]:
    """Restore the project from `kept`, run the command without a fault, and return its events."""
    start(project, kept, case, 0)
    case.check(project)
    return Path(f"{project.folder}.{EVENTS}").read_text(encoding="utf-8").splitlines()


def start(project: Project, kept: Path, case: Case, number: int) -> tuple[int, str]:
    """Restore the project from `kept`, run the command, and kill it at event `number` (0: never).

    Returns the exit code and the output.
    """
    project.restore(kept)
    for end in (EMPTIED, LOST):
        shutil.rmtree(f"{project.folder}{end}", ignore_errors=True)
    code, said = project.run(
        "stage", *case.words.split(), **fault(project.folder, project.state, "file", number)
    )
    assert code == (137 if number else 0) or "Traceback" not in said, said
    return code, said


def shape_of(folder: Path) -> list[tuple[str, int]]:
    """Return the names and sizes of all files, without the parts of names that differ by run."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        (CHANGING.sub("*", str(path.relative_to(folder))), path.stat().st_size) for path in paths
    ]


def ended_well(project: Project, case: Case) -> None:
    """Run the command again, even if it had finished before the kill, and check its results."""
    code, said = project.run("stage", *case.words.split())
    assert code == 0 or (code == 3 and "A copy is kept" in said), said
    case.check(project)
    left = [path for path in project.folder.rglob("*.tmp") if ".dvc" not in path.parts]
    assert not left, left


def strike(
    project: Project,
    kept: Path,
    case: Case,
    number: int,
    events: list[str],
    before: dict[str, object],
) -> Iterable[tuple[str, str]]:
    """Kill the command at event `number`, and try each state of the files after it.

    Yields the name of each tried state, and a description of what was wrong ("" if nothing was).
    before: what `shape_of` returned for each state at the previous event. This function updates it.
    """
    at_end = number > len(events)
    start(project, kept, case, number)
    flushes = sum(event.startswith("flush") for event in events[: number - 1])
    for state, end in STATES.items():
        found = Path(f"{project.folder}{end}")
        if not found.exists():
            continue
        # a flush may change only contents, so a state after another flush is tried again
        shape = shape_of(found), flushes * (state == "lost")
        same = shape == before.get(state)
        before[state] = shape
        if same and not at_end:
            continue
        if end:
            shutil.rmtree(project.folder)
            found.rename(project.folder)
        wrong = ""
        try:
            if at_end:  # the command has ended, so its result must exist
                case.check(project)
            ended_well(project, case)
        except Exception as error:
            wrong = f"{type(error).__name__}: {' '.join(str(error).split())[-500:]}"
        yield state, wrong


def sweep(
    name: str, base: Path, programs: Path, chosen: Callable[[str], bool]
) -> tuple[Counter, list[str]]:
    """Kill one command at the chosen events, and at its end.

    Returns the number of events, how often each of STATES was tried, and the problems.
    """
    case, tried, wrong = CASES[name], Counter[str](), list[str]()
    project, kept = begun(name, base, programs)
    events = events_of(project, kept, case)
    before: dict[str, object] = {}
    for number, event in enumerate([*events, THE_END], start=1):
        if not chosen(event) and event != THE_END:
            continue
        tried["events"] += 1
        for state, problem in strike(project, kept, case, number, events, before):
            tried[state] += 1
            if problem:
                wrong.append(
                    f"{name}, {state} at event {number} of {len(events)} ({event}): {problem}"
                )
                print(wrong[-1], flush=True)
    return tried, wrong


def one_in(number: int) -> Callable[[str], bool]:
    """Return a function that returns True in one of `number` calls, starting with the first."""
    turns = cycle([True, *[False] * (number - 1)])
    return lambda _: next(turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--commands", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument(
        "--every", type=int, default=1, help="kill at every N-th event, and at the end"
    )
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="file-kills-") as folder:
        base = Path(folder)
        programs = forked_stages.client(base / "bin", base / kills.SOCKET)
        stages = forked_stages.start(
            base / kills.SOCKET,
            os.environ | {"PYTHONPATH": str(kills.ROOT), "OMP_NUM_THREADS": "1"},
        )
        try:
            for name in arguments.commands:
                began = time.monotonic()
                tried, wrong = sweep(name, base, programs, one_in(arguments.every))
                failed += len(wrong)
                counts = ", ".join(f"{what} {number}" for what, number in tried.items())
                print(
                    f"{name}: {counts}; failed {len(wrong)}; {time.monotonic() - began:.0f} s",
                    flush=True,
                )
        finally:
            stages.kill()
            stages.wait()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
