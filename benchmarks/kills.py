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
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
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


SOCKET = "stages.socket"
# the program `stage` of the project: hands its words and its files over, and ends with the code that it is told
CLIENT = """#!{python} -IS
import socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [chr(0).join(sys.argv[1:]).encode()], [0, 1, 2])
    said = server.recv(16)
sys.exit(int(said or b"137"))
"""


def make_project(folder: Path) -> dict[str, str]:
    """A repository with the project's code and a small plan. Returns the environment of its commands."""
    for name in ("sfumato", "stages", "pipelines"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    program = folder / "bin" / "stage"
    program.parent.mkdir()
    program.write_text(CLIENT.format(python=sys.executable, address=str(folder / SOCKET)))
    program.chmod(0o755)
    environment = os.environ | {
        "SFUMATO_STATE": str(folder / ".sfumato"),
        "SFUMATO_CHECKPOINT_EVERY": "2",
        "PYTHONPATH": str(folder),
        "PATH": f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    for words in (["git", "init", "-q"], ["dvc", "init", "-q"], ["dvc", "config", "core.analytics", "false"]):
        subprocess.run(words, cwd=folder, env=environment, check=True)
    return environment


# --- stages by fork ---------------------------------------------------------------------------------------------------


def start_stages(folder: Path, environment: dict[str, str]) -> int:
    """Start the process that runs the project's stages. Returns its id."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / SOCKET))
    listening.listen()
    if process := os.fork():
        listening.close()
        return process
    try:
        os.environ.update(environment)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        for module in ("torch", "torchvision", "scipy.stats", "sklearn.datasets", "opacus", "dp_accounting", "yaml"):
            __import__(module)
        from stages import cli

        serve(listening, cli.main)
    finally:
        traceback.print_exc()
        os._exit(1)


def serve(listening: socket.socket, program) -> None:
    """Fork for each connection, and tell it how its stage ended. One without words ends all stages (SIGKILL)."""
    running: dict[int, socket.socket] = {}
    waiting = selectors.DefaultSelector()
    waiting.register(listening, selectors.EVENT_READ)
    while True:
        for _ in waiting.select(0.01):
            connection, _ = listening.accept()
            words, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
            if not words:
                for process in running:
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                running.clear()
                connection.close()
                continue
            if (process := os.fork()) == 0:
                listening.close()
                run_stage(words.decode().split("\0"), files, program)
            for file in files:
                os.close(file)
            running[process] = connection
        for process in list(running):
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                with running.pop(process) as connection:
                    connection.send(str(os.waitstatus_to_exitcode(status) % 256).encode())


def run_stage(words: list[str], files: list[int], program) -> None:
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    sys.argv = ["stage", *words]
    code = 1
    try:
        program()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def end_stages(folder: Path) -> None:
    """Kill every stage that runs, and wait until it is gone."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(str(folder / SOCKET))
        server.shutdown(socket.SHUT_WR)
        server.recv(1)


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
            end_stages(folder)
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
    assert not list((folder / ".sfumato/runs").iterdir())


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
        stages = start_stages(folder, environment)
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
        os.kill(stages, signal.SIGKILL)
        print(f"{killed} kills over {version} versions in {time.perf_counter() - began:.0f} s: nothing lost or twice")


if __name__ == "__main__":
    main()
