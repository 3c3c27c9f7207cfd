"""DVC's lock lists running programs by process number. Numbers are used again after a reboot and in
every new container.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from sfumato.planning.project import repro
from sfumato.planning.running import RUNNING, holders, remove_unused_lock

SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
COMMAND = "/opt/sfumato/bin/dvc repro"


@pytest.fixture
def started() -> Iterator:
    """Yield a function that starts a program, which ends with the test. The function's arguments
    are the last words of the program's command line.
    """
    programs = []

    def start(*words: str) -> int:
        programs.append(subprocess.Popen([*SLEEP, *words], stdout=subprocess.PIPE))
        programs[-1].stdout.readline()  # it runs
        return programs[-1].pid

    yield start
    for program in programs:
        program.kill()
        program.communicate()


def write_lock(
    folder: Path, process: int, command: str = COMMAND, age: float = 0.0, path: str = "out"
) -> Path:
    """Write DVC's lock, last changed `age` seconds ago, in which a process writes one path and
    reads another.
    """
    lock = folder / RUNNING
    lock.parent.mkdir(parents=True, exist_ok=True)
    named = {"pid": process, "cmd": command}
    lock.write_text(
        json.dumps({"read": {str(folder / "in"): [named]}, "write": {str(folder / path): named}})
    )
    os.utime(lock, (time.time() - age, time.time() - age))
    return lock


def running(folder: Path) -> list[bool]:
    return [holder.runs for holder in holders(folder)]


def test_the_program_of_the_lock_runs(tmp_path, started):
    write_lock(tmp_path, started("repro"))
    assert running(tmp_path) == [True, True]
    write_lock(tmp_path, started(), command="notebook.py")  # DVC used as a library
    assert running(tmp_path) == [True, True]


def test_a_number_that_another_command_has_by_now_is_not_running(tmp_path, started):
    write_lock(tmp_path, started("serve"))
    assert running(tmp_path) == [False, False]


def test_a_program_that_began_after_the_lock_did_not_write_it(tmp_path, started):
    write_lock(tmp_path, started("repro"), age=3600)
    assert running(tmp_path) == [False, False]


def test_a_zombie_process_is_not_running(tmp_path, started):
    """In a container, an ended program remains as a zombie if the first process never waits for
    others.
    """
    process = started("repro")
    write_lock(tmp_path, process)
    psutil.Process(process).kill()
    until = time.monotonic() + 10
    while psutil.Process(process).status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
        time.sleep(0.01)
    assert running(tmp_path) == [False, False]


def test_only_a_lock_of_ended_programs_is_removed(tmp_path, started):
    remove_unused_lock(tmp_path)
    assert not (tmp_path / ".dvc").exists()
    lock = write_lock(tmp_path, started("repro"))
    remove_unused_lock(tmp_path)
    assert lock.exists()
    lock.write_text("{")
    remove_unused_lock(tmp_path)
    assert lock.exists()  # because its content cannot be read
    write_lock(tmp_path, started("serve"))
    remove_unused_lock(tmp_path)
    assert not lock.exists()


@pytest.fixture
def project(tmp_path, environment) -> Path:
    """A project of DVC with one stage, which waits for a file `go` and then writes `out`."""
    environment["DVC_NO_ANALYTICS"] = "1"
    environment["DVC_SITE_CACHE_DIR"] = str(tmp_path / "site")
    folder = tmp_path / "project"
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q", "--no-scm"], cwd=folder, check=True)
    wait = "touch begun; while [ ! -e go ]; do sleep 0.05; done; echo made > out"
    (folder / "dvc.yaml").write_text(
        yaml.safe_dump({"stages": {"make": {"cmd": wait, "outs": ["out"]}}})
    )
    return folder


def test_a_run_goes_on_where_another_program_has_the_old_number(project, started):
    """While a program with the old number runs, `dvc repro` refuses to start, but `Project.run`
    starts.
    """
    (project / "go").touch()
    write_lock(project, started("serve"), age=3600)
    busy = subprocess.run(
        [sys.executable, "-m", "dvc", "repro"], cwd=project, capture_output=True, text=True
    )
    assert busy.returncode != 0 and "is busy" in busy.stderr
    repro(project, shown=False)
    assert (project / "out").read_text() == "made\n"


@pytest.mark.parametrize("words", [["-m", "dvc", "repro"], ["-P", "-m", "dvc", "repro", "make"]])
def test_the_lock_of_a_dvc_at_work_stays(project, words):
    dvc = subprocess.Popen([sys.executable, *words], cwd=project, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not (project / "begun").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert {*running(project)} == {True}
        remove_unused_lock(project)
        assert (project / RUNNING).exists()
    finally:
        (project / "go").touch()
        assert dvc.wait(60) == 0
    assert running(project) == []
