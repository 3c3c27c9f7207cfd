"""Ctrl-C on the terminal of `stage run`: it stops, and the next run continues at no cost."""

import os
import pty
import select
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest
from small_repository import Repository, make_repository

CTRL_C = b"\x03"
SMALL = {
    "recipe": "dp-feta",
    "run": ["count", "central", "pretrain", "finetune", "synthesize"],
    "finetune": {"steps": 40, "trainable": "attention"},
}


@pytest.fixture
def repository(tmp_path) -> Repository:
    made = make_repository(tmp_path)
    made.edit(**SMALL)
    return made


def run_on_a_terminal(
    repository: Repository, *words: str, interrupt: Callable[[], bool]
) -> tuple[int, str]:
    """Run `stage` as a shell does, not by fork, with a terminal of its own.

    interrupt: function that returns True when it is time to press Ctrl-C, which is pressed once.
    Returns the exit code and what the terminal shows.
    """
    process, terminal = pty.fork()
    if not process:
        os.chdir(repository.path)
        os.execvpe("stage", ["stage", *words], repository.environment)
    shown = b""
    pressed = False
    while True:
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                shown += os.read(terminal, 2**16)
            except OSError:  # the terminal is closed
                break
        if not pressed and interrupt():
            os.write(terminal, CTRL_C)
            pressed = True
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    os.close(terminal)
    return code, shown.decode(errors="replace")


def steps(repository: Repository) -> int:
    """Return the number of checkpoints of DP-SGD that the journal names."""
    return sum(entry["kind"] == "progress" for entry in repository.journal())


def still_running(repository: Repository) -> list[str]:
    """Return the programs in the repository's folder that do not end within ten seconds."""
    deadline = time.monotonic() + 10
    while True:
        found = []
        for process in psutil.process_iter(["cwd", "cmdline", "status"]):
            inside = process.info["cwd"] == str(repository.path)
            if inside and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.info["cmdline"] or []))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def test_ctrl_c_stops_a_run_that_continues_at_no_cost(repository):
    code, shown = run_on_a_terminal(repository, "run", interrupt=lambda: steps(repository) >= 3)
    assert code == 130 and "Traceback" not in shown, shown
    assert "Run the same command again" in " ".join(shown.split())
    assert still_running(repository) == []
    before = steps(repository)
    assert 3 <= before < SMALL["finetune"]["steps"]
    text = repository.stage("run")
    assert {"count", "central"}.isdisjoint(
        line.removeprefix("> stage ") for line in text.splitlines()
    )
    assert repository.opened() == ["count", "central", "finetune"]
    assert (
        subprocess.run(
            ["stage", "ledger", "check", "--epsilon", "1"], **repository.given, check=False
        ).returncode
        == 0
    )
