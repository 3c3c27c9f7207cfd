"""`unused` detects processes that work with real images. It detects them until they end, and not
afterwards.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sfumato.errors import BudgetError
from sfumato.storage.in_use import in_use, unused, use_until_the_end

WORK = """
import sys, time
from pathlib import Path
from sfumato.storage.in_use import use_until_the_end
use_until_the_end(Path(sys.argv[1]), *sys.argv[2:])
print("at work", flush=True)
time.sleep(60)
"""
FORK = """
import os, sys
from pathlib import Path
from sfumato.errors import BudgetError
from sfumato.storage.in_use import unused, use_until_the_end
state = Path(sys.argv[1])
use_until_the_end(state, "clinic")
if not (child := os.fork()):
    sys.exit()
os.waitpid(child, 0)
try:
    with unused(state, "clinic"):
        print("free")
except BudgetError:
    print("in use")
"""


def locks(state: Path) -> list[Path]:
    return [path for path in state.rglob("*.lock") if not path.name.startswith(".")]


def free(state: Path, dataset_id: str) -> bool:
    try:
        with unused(state, dataset_id):
            return True
    except BudgetError:
        return False


def test_several_processes_may_use_a_dataset_at_once(tmp_path):
    with in_use(tmp_path, "clinic"), in_use(tmp_path, "clinic"):
        assert len(locks(tmp_path)) == 2 and not free(tmp_path, "clinic")
    assert locks(tmp_path) == [] and free(tmp_path, "clinic")


def test_only_work_on_the_dataset_or_on_any_is_in_the_way(tmp_path):
    with in_use(tmp_path, "clinic"):
        assert free(tmp_path, "clinic.2") and not free(tmp_path, "clinic")
    with in_use(tmp_path):
        assert not free(tmp_path, "clinic.2") and not free(tmp_path, "clinic")


@pytest.mark.parametrize("words", [("clinic",), ()])
def test_a_killed_process_is_named_until_it_is_gone(tmp_path, words):
    arguments = [sys.executable, "-c", WORK, str(tmp_path), *words]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "at work\n"
        named = rf"'clinic' is in use by python \(process {other.pid} on .+\): wait until"
        with pytest.raises(BudgetError, match=named), unused(tmp_path, "clinic"):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert len(locks(tmp_path)) == 1, "it could not delete its lock"
    assert free(tmp_path, "clinic") and locks(tmp_path) == []


def test_a_process_that_ends_leaves_no_lock(tmp_path):
    ending = WORK.replace("time.sleep(60)", "")
    subprocess.run(
        [sys.executable, "-c", ending, str(tmp_path), "clinic"], check=True, capture_output=True
    )
    assert (tmp_path / "in_use" / "clinic").is_dir() and locks(tmp_path) == []


def test_work_waits_until_the_images_are_forgotten(tmp_path):
    """Only then may the work check whether the images still exist."""
    with unused(tmp_path, "clinic"):
        arguments = [sys.executable, "-c", WORK, str(tmp_path), "clinic"]
        other = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(2)
        assert locks(tmp_path) == []
    with other:
        assert other.stdout.readline() == "at work\n"
        other.kill()


def test_the_end_of_a_fork_does_not_end_the_work(tmp_path):
    parent = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert parent.stdout == "in use\n"


def test_names_of_locks_hold_no_options(tmp_path, monkeypatch):
    """For `stage init PATIENTS`, the command is named, but not the folder."""
    monkeypatch.setattr(sys, "argv", ["/usr/bin/stage", "init", "PATIENTS", "--groups=x"])
    use_until_the_end(tmp_path)
    (lock,) = locks(tmp_path)
    assert re.fullmatch(rf"stage init \(process {os.getpid()} on \S+\) \w{{8}}\.lock", lock.name)


def test_without_a_state_directory_nothing_is_written(tmp_path):
    with in_use(tmp_path / "state", "clinic"):
        assert not (tmp_path / "state").exists()
