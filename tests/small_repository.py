"""A small repository with the project's code, for tests of `dvc repro`."""

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import forked_stages
import numpy as np
import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
SIZE = 317  # images of the source. A test searches git for this number.
# The key of the hold-out is fixed, so that the numbers that a test searches git for are always the
# same. None of them equals a public number, such as the 62 classes of glyphs.
KEY = bytes(range(32))
SMALL = {
    "recipe": "full",
    "profile": "digits",
    "data": {"dataset_id": "small", "source": "npz", "path": "source.npz"},
    # A small ε is accounted faster
    "privacy": {"epsilon": 1.0, "size_hint": 300, "lifetime_epsilon": "unlimited"},
    "model": {"width": 16, "multipliers": [1, 1]},
    "public": {"per_class": 4},
    "frequency": {"size": 200},
    "classifier": {"steps": 6, "width": 8},
    "select": {"images": 60},
    "auxiliary": {"steps": 6, "images": 120},
    "pretrain": {"steps": 6, "batch": 16},
    "run": [
        *("count", "central", "frequency", "classifier", "auxiliary", "teacher"),
        *("select", "pretrain", "saliency", "finetune", "synthesize", "evaluate"),
    ],
    "finetune": {"steps": 14, "batch": 60, "draws": 1, "trainable": "salient-lora"},
    "synthesize": {"count": 120, "steps": 3},
    "evaluate": {"classifiers": ["lr"], "seeds": [0], "steps": 20, "bound": False, "fidelity": []},
}


@functools.cache
def server() -> tuple[psutil.Process, Path]:
    """Start a process that runs stages and DVC by fork, with this tree's code.

    A command then takes a tenth of the time, because it imports nothing again. Returns the process
    and its address.
    """
    base = Path(tempfile.mkdtemp(prefix="stages-"))
    process = forked_stages.start(
        base / "socket", os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    )
    atexit.register(lambda: (process.kill(), process.wait(), shutil.rmtree(base)))
    return psutil.Process(process.pid), base / "socket"


@functools.cache
def programs() -> Path:
    """Write the programs `stage` and `dvc`, which run by fork. Returns their folder."""
    address = server()[1]
    return forked_stages.client(address.with_name("bin"), address)


def forked_seconds() -> float:
    """Return the processor seconds of all forked programs that have ended."""
    return sum(server()[0].cpu_times()[2:4])


class Repository:
    """A small repository with the project's code.

    environment: environment of the installed program `stage`, which runs the repository's code;
    forked: whether programs run by fork instead, with this tree's code, so that nothing is imported
    again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.forked = True
        self.environment = os.environ | {
            "SFUMATO_STATE": str(path / "state"),
            "PYTHONPATH": str(path),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "SFUMATO_CHECKPOINT_EVERY": "1",
        }
        self.edits: dict = {}

    @property
    def given(self) -> dict:
        """Return the arguments of `subprocess` for a program: folder and environment."""
        path = self.environment["PATH"]
        return {
            "cwd": self.path,
            "env": self.environment | {"PATH": f"{programs()}:{path}" if self.forked else path},
        }

    def run(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(words, **self.given, capture_output=True, text=True, timeout=1500)
        return done.returncode, done.stdout + done.stderr

    def stage(self, command: str, *said: str, code: int = 0) -> str:
        """Run a command of `stage`, which must end with `code` and print all of `said`. Returns its
        output.
        """
        found, text = self.run("stage", *command.split())
        assert found == code and all(words in text for words in said) and "Traceback" not in text, (
            text
        )
        return text

    def kill(self, name: str, reached: Callable[[], bool]) -> None:
        """Start a stage, and kill it when `reached()` is true.

        A forked stage has its own process, which is killed, too.
        """
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(["stage", name], **self.given, **silent)
        while not reached():
            assert process.poll() is None, f"{name} ended before it could be killed"
            time.sleep(0.02)
        if self.forked:
            forked_stages.end_stages(server()[1])
        process.kill()
        process.wait()

    def repro(self, *words: str) -> str:
        code, text = self.run("dvc", "repro", *words)
        assert code == 0, text
        return text

    def edit(self, **content) -> None:
        from sfumato.settings.recipes import overlaid

        self.edits = overlaid(self.edits, content)
        (self.path / "params.yaml").write_text(
            yaml.safe_dump(overlaid(SMALL, self.edits), sort_keys=False)
        )

    def opened(self) -> list[str]:
        """Return the stages of all charges ever opened, in order."""
        return [entry["record"]["stage"] for entry in self.journal() if entry["kind"] == "open"]

    def journal(self) -> list[dict]:
        path = self.path / "state" / "odometer" / "small.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def write_source(self, size: int) -> None:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = np.rint(bunch.images[:size] * (255 / 16)).astype(np.uint8)
        classes = np.array([str(i) for i in range(10)])
        np.savez(
            self.path / "source.npz", images=images, labels=bunch.target[:size], classes=classes
        )


def ran(text: str) -> set[str]:
    return {line.split("'")[1] for line in text.splitlines() if line.startswith("Running stage")}


def make_repository(path: Path) -> Repository:
    """Create a repository from the project's files. Nothing is run yet."""
    for name in ("sfumato", "stages", "pipelines"):
        shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, path / name)
    repository = Repository(path)
    for words in (
        ["git", "init", "-q"],
        ["dvc", "init", "-q"],
        ["dvc", "config", "core.analytics", "false"],
    ):
        assert repository.run(*words)[0] == 0
    (path / ".git/info/exclude").write_text("/state/\n")
    repository.edit()
    repository.write_source(SIZE)
    key = path / "state" / "keys" / "small"
    key.parent.mkdir(parents=True)
    key.write_bytes(KEY)
    return repository


QUERIES = ["central", "count", "finetune", "frequency", "saliency", "teacher"]


# Stages that run again after any change of params.yaml, with the same results
PREPARED = {"prepare-sensitive", "prepare-public", "plan"}
AFTER = {"synthesize", "student", "ledger", "report", "evaluate"}
