"""Disturb a project by kills and other faults; check that it spends no more than planned.

    python benchmarks/kills.py --kills 100 --seed 0

Projects are created in a temporary folder, as `stage init` writes them. They protect images or
persons, and use one-shot queries or DP-SGD. Faults are SIGKILL, SIGINT, a MemoryError and a full
disk of the state directory (`tests/faults.py`). They occur before, during and after the writing of
a journal entry, and at random times during a full `dvc repro`. The next `dvc repro` must succeed
without help. Then each query must have one charge, the ledger must contain these charges, ε must
equal the plan's, every artifact must be complete, and no temporary file may be left. If a kill
damaged one of DVC's own files, the remedy of `stage doctor` is applied and counted. Finally, Python
processes are killed during `Project.run`: DVC and its stage must end within five seconds. To save
time, DVC and each stage are forked from a process that has already imported the libraries.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from PIL import Image

from sfumato.privacy.accountant import epsilon
from sfumato.privacy.odometer import CLOSE, Odometer
from sfumato.privacy.policy import SpendingPolicy
from sfumato.storage.artifacts import read_artifact
from sfumato.storage.documents import read_json, validated

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import forked_stages  # noqa: E402
from faults import KINDS, MOMENTS, SIGNALS, fault  # noqa: E402

from stages.fork_server import SOCKET  # noqa: E402

NAME, PERSONS, EACH = "photos", 30, 2
LONGEST = 600  # Seconds that a run may take
IN_A_ROW = 4  # After at most this many runs with a fault, there is one run without a fault
AMID = 1.5  # Every other fault occurs within this many seconds of the run's first journal entry
GONE = 5  # Seconds within which DVC and its stage must end
ENTRIES = (
    "faults to inject at four moments before, within and after the writing of each journal entry. "
    "none: no faults; turn: one fault per moment, of each kind in turn; every: one fault of every "
    "kind per moment"
)
CURES = ("rm .dvc/tmp/rwlock", "cp .dvc/tmp/whole.lock dvc.lock")
UNITS = {"image": ["--one-image-each"], "group": ["--groups", r"^(p\d+)_"]}
RECIPES: dict[str, dict[str, Any]] = {  # last query -> additions to params.yaml
    "frequency": {
        "recipe": "dp-merf",
        "run": ["count", "frequency", "auxiliary", "synthesize"],
        "frequency": {"size": 50},
        "auxiliary": {"steps": 3, "images": 30, "width": 8},
        "synthesize": {"count": 30},
    },
    "finetune": {
        "recipe": "dpdm",
        "run": ["pretrain", "finetune", "synthesize"],
        "model": {"width": 8, "multipliers": [1, 1]},
        "finetune": {"steps": 4, "batch": 20, "draws": 1},
        "synthesize": {"count": 10, "steps": 2},
    },
}


# --- a project ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Project:
    """A project under test.

    folder: contains the project, its state directory, and the files that faults use;
    query: the last query;
    programs: folder with the programs `stage` and DVC.
    """

    folder: Path
    query: str
    programs: Path

    @property
    def home(self) -> Path:
        return self.folder / "project"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "SFUMATO_STATE": str(self.state),
            "SFUMATO_CHECKPOINT_EVERY": "2",
            "DVC_SITE_CACHE_DIR": str(self.folder / "dvc"),
            "DVC_NO_ANALYTICS": "1",
            "COLUMNS": "200",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{self.programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *words: str, **more: str) -> subprocess.Popen[str]:
        """Start a program in this folder. more: additions to its environment."""
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(words, cwd=self.home, env=self.environment | more, text=True, **out)  # type: ignore[call-overload, no-any-return]

    def run(self, *words: str, **more: str) -> tuple[int, str]:
        """Run a program to its end. Returns its exit code and its output."""
        process = self.start(*words, **more)
        said = process.communicate(timeout=600)[0]
        return process.returncode, said

    def repro(self, *targets: str) -> tuple[str, ...]:
        return (str(self.programs / "module"), "-P", "-m", "dvc", "repro", "-q", *targets)

    @property
    def odometer(self) -> Odometer:
        return Odometer(self.state, NAME)

    def keep(self, name: str) -> Path:
        """Copy the whole folder in its current state. Returns the copy."""
        return shutil.copytree(
            self.folder, self.folder.with_name(f"{self.folder.name}.{name}"), symlinks=True
        )

    def restore(self, kept: Path) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(kept, self.folder, symlinks=True)


def make_project(folder: Path, query: str, unit: str, programs: Path) -> Project:
    """Create a project by `stage init` from a few persons' small pictures, with a small recipe."""
    project, random_numbers = Project(folder, query, programs), np.random.default_rng(0)
    pictures = folder.with_name(f"{folder.name}.pictures") / NAME
    for person in range(PERSONS):
        kind = pictures / "abc"[person % 3]
        kind.mkdir(parents=True, exist_ok=True)
        for i in range(EACH):
            pixels = random_numbers.integers(80 * (person % 3), 80 * (person % 3) + 80, (8, 8))
            Image.fromarray(pixels.astype(np.uint8)).save(kind / f"p{person}_{i}.png")
    project.home.mkdir(parents=True)
    options = ["--epsilon", "5", "--size-hint", "20", "--minutes", "1", "--yes", *UNITS[unit]]
    code, said = project.run("stage", "init", str(pictures), *options)
    assert code == 0, said
    file = project.home / "params.yaml"
    own = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert "lifetime_epsilon" not in own["privacy"], own
    kept = {key: own[key] for key in ("profile", "seed", "data", "privacy")}
    file.write_text(yaml.safe_dump(kept | RECIPES[query], sort_keys=False), encoding="utf-8")
    return project


# --- what must be true ----------------------------------------------------------------------------


def check(project: Project, *, whole: bool) -> None:
    """Check that everything planned was charged exactly once, and released.

    Raises AssertionError if not. whole: whether to check the ledger, too.
    """
    plan = project.home / "artifacts/plan"
    budget, policy = (
        read_json(plan / "budget.json"),
        validated(SpendingPolicy, read_json(plan / "permission.json")),
    )
    charges = project.odometer.charges()
    assert sorted(charge.record["stage"] for charge in charges) == sorted(budget["stages"]), charges
    assert all(charge.end == CLOSE for charge in charges), charges
    spent = epsilon(project.odometer.events(), policy.delta, policy.accountant, policy.adjacency)
    assert abs(spent - budget["epsilon"]) < 1e-9, (spent, budget["epsilon"])
    newest = {charge.record["stage"]: charge.record["id"] for charge in charges}
    for stage, record in newest.items():
        assert record in read_artifact(project.home / "artifacts" / stage, stage).records
    left = [path for path in project.folder.rglob("*.tmp") if ".dvc" not in path.parts]
    assert not left, left
    kept = {
        path
        for path in project.state.glob("runs/*/*")
        if path.suffix != ".lock" and path.name != "lock"
    }
    assert kept == {project.state / "runs" / charge.id / "released" for charge in charges}, kept
    if whole:
        ledger = read_json(project.home / "ledger.json")
        assert {record["id"] for record in ledger["records"]} == {*newest.values()}
        code, said = project.run("stage", "ledger", "check", "--artifacts", "--epsilon", "5")
        assert code == 0, said


def cure(project: Project) -> bool:
    """Run the commands that `stage doctor` advises after a kill damaged one of DVC's files.

    Returns whether it advised any.
    """
    text = " ".join(project.run("stage", "doctor")[1].replace("│", " ").split())
    found = [command for command in CURES if command in text]
    for command in found:
        subprocess.run(command.split(), cwd=project.home, check=True)
    return bool(found)


# --- faults at every entry of the journal ---------------------------------------------------------

# A function that runs a project. Its keyword arguments become environment variables, which may
# request a fault.
Run = Callable[..., tuple[int, str]]


def repro(project: Project, **more: str) -> tuple[int, str]:
    """Run `dvc repro` up to the last query."""
    return project.run(*project.repro(project.query), **more)


def moments_of(project: Project, kept: Path, run: Run) -> list[str]:
    """Restore the project from `kept`, run it without a fault, and return its moments.

    A moment is a point in the writing of a journal entry at which a fault can occur (MOMENTS).
    """
    project.restore(kept)
    code, said = run(project, **fault(project.folder, project.state))
    assert code == 0, said
    check(project, whole=False)
    moments = (project.folder / "moments").read_text(encoding="utf-8").split("\n")[:-1]
    assert moments and len(moments) % len(MOMENTS) == 0, moments
    return moments


def strike_at(project: Project, kept: Path, run: Run, kind: str, number: int) -> tuple[int, int]:
    """Restore the project from `kept`, run it with a fault at moment `number`, and run it again.

    Raises AssertionError if the second run fails. Returns (1, 0): one fault, no repairs.
    """
    project.restore(kept)
    failed, said = run(project, **fault(project.folder, project.state, kind, number))
    assert kind == "kill" or "Traceback" not in said, said
    # If the disk is full, the run may succeed: it may have nothing left to write
    assert failed or kind == "full", said
    (project.folder / "full").unlink(missing_ok=True)
    code, said = run(project)
    assert code == 0, said
    check(project, whole=False)
    return 1, 0


def kinds_at(number: int, *, every: bool = False) -> tuple[str, ...]:
    """Return the kinds of fault for moment `number`: one in turn, or all if `every`."""
    entry, moment = divmod(number - 1, len(MOMENTS))
    return KINDS if every else (KINDS[(entry + moment) % len(KINDS)],)


# --- faults at random times -----------------------------------------------------------------------


def strike_after(project: Project, kind: str, seconds: float, *, amid: bool) -> tuple[bool, int]:
    """Run `dvc repro`, with a fault of this kind after `seconds`.

    If an earlier fault damaged DVC's files, they are repaired, and the run is started again.

    amid: whether to count the seconds from the run's first journal entry, instead of from its
    start.

    Returns whether the fault stopped the last run, and the number of repairs. Raises AssertionError
    if a run fails before the fault and cannot be repaired.
    """
    for cured in range(len(CURES) + 1):
        process = project.start(*project.repro(), **fault(project.folder, project.state, kind))
        while amid and process.poll() is None and not (project.folder / "moments").exists():
            time.sleep(0.01)
        try:
            said = process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            if kind == "full":
                (project.folder / "full").touch()
            else:
                forked_stages.end_stages(project.programs.parent / SOCKET, SIGNALS[kind])
            process.communicate(timeout=600)
            (project.folder / "full").unlink(missing_ok=True)
            return process.returncode != 0, cured
        if process.returncode == 0:
            return False, cured
        assert cure(project), said
    raise AssertionError(said)


def strike_often(
    project: Project, fresh: Path, kind: str, seconds: Sequence[float]
) -> tuple[int, int]:
    """Disturb one run after another until one finishes.

    The first fault, and then every other fault, is timed from the first journal entry of its run.

    Returns how many runs were stopped, and how many repairs there were.
    """
    project.restore(fresh)
    hit = cured = 0
    for turn, length in enumerate([*seconds, LONGEST]):
        stopped, more = strike_after(project, kind, length, amid=turn % 2 == 0 and length < LONGEST)
        hit, cured = hit + stopped, cured + more
        if not stopped:
            break
    check(project, whole=True)
    return hit, cured


# --- processes that call Project.run --------------------------------------------------------------


def kill_caller(project: Project, pause: float) -> tuple[int, int]:
    """Kill a Python process during `Project.run`, `pause` seconds after a stage began.

    Returns (1, 0): one fault, no repairs. Raises AssertionError unless all processes that the
    killed process started end within GONE seconds.
    """
    words = [sys.executable, "-c", "import sfumato; sfumato.Project().run(progress=False)"]
    caller = subprocess.Popen(words, cwd=project.home, env=project.environment)
    started = psutil.Process(caller.pid)
    while not any("stage" in words_of(child) for child in started.children(recursive=True)):
        assert caller.poll() is None, "the run ended before it started a stage"
        time.sleep(0.05)
    time.sleep(pause)
    left = started.children(recursive=True)
    caller.kill()
    caller.wait()
    _, left = psutil.wait_procs(left, timeout=GONE)
    for process in left:
        process.kill()
    assert not left, f"{len(left)} child processes still run {GONE} s after their parent was killed"
    return 1, 0


def words_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


# --- all of it ------------------------------------------------------------------------------------


class Figures:
    """Number of injected faults by kind, and a list of the faults that were handled wrongly.

    stop: whether to stop at the first fault that is handled wrongly.
    """

    def __init__(self, stop: bool) -> None:
        self.tried, self.cured, self.failed, self.stop = Counter[str](), 0, list[str](), stop

    def note(
        self, kind: str, where: str, strike: Callable[..., tuple[int, int]], *given: Any
    ) -> int:
        """Call `strike(*given)`, and count its faults and repairs. Returns the number of faults."""
        start, wrong = time.monotonic(), ""
        try:
            hit, cured = strike(*given)
        except AssertionError as error:
            if self.stop:
                raise
            hit, cured, wrong = 1, 0, f" FAILED: {' '.join(str(error).split())[-400:]}"
            self.failed.append(f"{kind}, {where}")
        self.tried[kind] += hit
        self.cured += cured
        print(f"{kind}, {where}: faults {hit}; {time.monotonic() - start:.0f} s{wrong}", flush=True)
        return hit


def at_every_entry(project: Project, which: str, figures: Figures, *, every: bool) -> None:
    code, said = project.run(*project.repro("plan"))
    assert code == 0, said
    planned = project.keep("planned")
    for number, name in enumerate(moments_of(project, planned, repro), start=1):
        for kind in kinds_at(number, every=every):
            figures.note(
                kind,
                f"{which}, moment {number} ({name})",
                strike_at,
                project,
                planned,
                repro,
                kind,
                number,
            )


def at_random_times(
    project: Project, fresh: Path, which: str, most: int, draws: random.Random, figures: Figures
) -> None:
    """Try about `most` faults, each kind in turn. Each turn restores the project from `fresh`.

    which: name of the project, for messages.
    """
    start = time.monotonic()
    strike_often(project, fresh, "kill", [])
    quiet = time.monotonic() - start
    print(f"{which}: a run without faults takes {quiet:.0f} s", flush=True)
    for kind in cycle(KINDS):
        if most <= 0:
            break
        longest = [AMID if turn % 2 == 0 else 0.6 * quiet for turn in range(min(most, IN_A_ROW))]
        seconds = [draws.uniform(0.02, 1) * length for length in longest]
        most -= figures.note(
            kind, f"{which}, at random times", strike_often, project, fresh, kind, seconds
        )


def kill_callers(
    project: Project, fresh: Path, number: int, draws: random.Random, figures: Figures
) -> None:
    """Kill `number` processes that call `Project.run`, and then run the project without faults."""
    project.restore(fresh)
    for turn in range(number):
        figures.note("caller", f"{turn}", kill_caller, project, draws.uniform(0, 3))
    figures.note(
        "caller", "a run without faults", strike_often, project, project.keep("called"), "kill", []
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--kills", type=int, default=100, help="number of random faults, in total")
    parser.add_argument(
        "--entries", choices=("none", "turn", "every"), default="turn", help=ENTRIES
    )
    parser.add_argument(
        "--callers", type=int, default=10, help="processes to kill during Project.run"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    arguments = parser.parse_args()
    draws, figures, began = random.Random(arguments.seed), Figures(arguments.stop), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        base = Path(name)
        programs = forked_stages.client(base / "bin", base / SOCKET)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        stages = forked_stages.start(base / SOCKET, environment)
        try:
            for unit, query in product(UNITS, RECIPES):
                project = make_project(base / f"{unit}-{query}", query, unit, programs)
                which, fresh = f"{unit}, {query}", project.keep("fresh")
                if arguments.entries != "none":
                    at_every_entry(project, which, figures, every=arguments.entries == "every")
                at_random_times(
                    project,
                    fresh,
                    which,
                    arguments.kills // (len(UNITS) * len(RECIPES)),
                    draws,
                    figures,
                )
            kill_callers(project, fresh, arguments.callers, draws, figures)
        finally:
            stages.kill()
            stages.wait()
    tried = ", ".join(f"{kind} {number}" for kind, number in figures.tried.items())
    print(
        f"{tried}; repairs of DVC's own files: {figures.cured}; in {time.monotonic() - began:.0f} s"
    )
    print(f"failed or charged twice: {len(figures.failed)}")
    sys.exit(bool(figures.failed))


if __name__ == "__main__":
    main()
