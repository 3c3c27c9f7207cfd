"""Kill a small pipeline at random moments, and check that it cost what one quiet run costs.

    python benchmarks/kills.py --kills 40 --seed 0

A copy of the project in a temporary folder, with a state directory of its own, runs `dvc repro` on scikit-learn's
digits. DVC and the stage that it runs are killed (SIGKILL) at random moments. Where a kill leaves one of DVC's own
files cut or empty, so that DVC cannot read it, `stage doctor` must say so, and what it says is done. After each run
that comes to its end: one charge for each query, the ledger holds these charges and no others, every artifact is whole,
and nothing is left behind. Then the images get another version, so that all queries run anew, until so many kills were
made. A process that has imported the libraries forks for each stage, which saves most of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import forked_stages  # noqa: E402

SOCKET = "stages.socket"
QUERIES = ["central", "count", "finetune"]
CURES = ("rm .dvc/tmp/rwlock", "cp .dvc/tmp/whole.lock dvc.lock")
SMALL = {
    "recipe": "dp-feta",
    "profile": "digits",
    "run": ["count", "central", "pretrain", "finetune", "synthesize"],
    "privacy": {"lifetime_epsilon": "unlimited"},
    "model": {"width": 8},
    "pretrain": {"steps": 10, "batch": 16},
    "finetune": {"steps": 12, "batch": 100, "draws": 1},
    "synthesize": {"count": 50, "steps": 2},
}


def make_project(folder: Path) -> dict[str, str]:
    """A repository with the project's code and a small plan. Returns the environment of its commands."""
    for name in ("sfumato", "stages", "pipelines"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    programs = forked_stages.client(folder / "bin", folder / SOCKET)
    environment = os.environ | {
        "SFUMATO_STATE": str(folder / ".sfumato"),
        "SFUMATO_CHECKPOINT_EVERY": "2",
        "PYTHONPATH": str(folder),
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    for words in (["git", "init", "-q"], ["dvc", "init", "-q"], ["dvc", "config", "core.analytics", "false"]):
        subprocess.run(words, cwd=folder, env=environment, check=True)
    return environment


# --- runs -------------------------------------------------------------------------------------------------------------


def write_params(folder: Path, version: int) -> None:
    (folder / "params.yaml").write_text(yaml.safe_dump({**SMALL, "data": {"version": str(version)}}, sort_keys=False))


def run(folder: Path, environment: dict[str, str], seconds: float | None) -> bool:
    """`dvc repro`, killed with all its processes after `seconds`, if it lasts that long. Returns whether it was.

    Raises RuntimeError where it fails by itself.
    """
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            ["dvc", "repro"], cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            forked_stages.end_stages(folder / SOCKET)
            process.wait()
            return True
    if code != 0 and cure(folder, environment):
        return run(folder, environment, seconds)
    if code != 0:
        raise RuntimeError(f"dvc repro ended with {code}:\n{(folder / 'log.txt').read_text()[-3000:]}")
    return False


def cure(folder: Path, environment: dict[str, str]) -> bool:
    """Do what `stage doctor` says where a kill left one of DVC's files damaged. Returns whether it says anything."""
    told = subprocess.run(["stage", "doctor"], cwd=folder, env=environment, capture_output=True, text=True)
    text = " ".join(told.stdout.replace("│", " ").split())
    found = [command for command in CURES if command in text]
    for command in found:
        subprocess.run(command.split(), cwd=folder, check=True)
        print(f"a kill left a file of DVC's damaged; stage doctor says {command!r}, which is done", flush=True)
    return bool(found)


def check(folder: Path, environment: dict[str, str], version: int) -> None:
    """Raise AssertionError where the last run cost more than one charge a query, or left something behind."""
    lines = (folder / ".sfumato/odometer/digits.jsonl").read_text().splitlines()
    newest = {}  # run -> the record that it goes by since it was last resumed
    for entry in map(json.loads, lines):
        if entry["kind"] in ("open", "resume"):
            newest[entry.get("id") or entry["record"]["id"]] = entry["record"]
    mine = [record for record in newest.values() if record["data_version"] == str(version)]
    assert sorted(record["stage"] for record in mine) == QUERIES, [record["stage"] for record in mine]
    ledger = json.loads((folder / "ledger.json").read_text())
    assert {record["id"] for record in ledger["records"]} == {record["id"] for record in mine}
    whole = subprocess.run(
        ["stage", "ledger", "check", "--artifacts"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert whole.returncode == 0, whole.stdout + whole.stderr
    left = [path for part in ("artifacts", "data", ".sfumato") for path in (folder / part).rglob("*.tmp")]
    assert not left, left
    kept = [path for path in (folder / ".sfumato/runs").glob("*/*") if path.name not in ("lock", "copying.lock")]
    assert {path.name for path in kept} == {"released"}, kept  # a copy of what the ledger holds, and no checkpoint
    assert {path.parent.name for path in kept} == {run for run, record in newest.items() if record in mine}, kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--longest", type=float, default=0.6, help="a kill comes within this share of the time of a quiet run"
    )
    arguments = parser.parse_args()
    moments = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder, killed, version = Path(name), 0, 0
        environment = make_project(folder)
        stages = forked_stages.start(folder / SOCKET, environment)
        write_params(folder, version)
        start = began = time.perf_counter()
        run(folder, environment, None)
        quiet = time.perf_counter() - start
        check(folder, environment, version)
        print(f"a quiet run takes {quiet:.0f} s", flush=True)
        while killed < arguments.kills:
            version += 1
            write_params(folder, version)
            here = 0
            while killed < arguments.kills and run(
                folder, environment, moments.uniform(0.02, arguments.longest) * quiet
            ):
                killed, here = killed + 1, here + 1
            run(folder, environment, None)
            check(folder, environment, version)
            print(
                f"version {version}: {here} kills, {len(QUERIES)} charges, ledger and artifacts whole ({killed} kills)",
                flush=True,
            )
        stages.kill()
        print(f"{killed} kills over {version} versions in {time.perf_counter() - began:.0f} s: nothing lost or twice")


if __name__ == "__main__":
    main()
