"""`SFUMATO_LAUNCH` in one process: what a launcher must start, and which exit code is the
stage's.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from sfumato.errors import ConfigError, SfumatoError
from stages import launch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("here")


def test_a_launcher_that_launches_itself_ends_at_once(environment, here):
    """With `python` as the launcher, the command would start itself again without end."""
    environment[launch.LAUNCH] = "touch begun"
    environment[launch.EXIT_CODE] = "of the first level"
    with pytest.raises(
        ConfigError, match="does not start a group of processes: set it to `torchrun`"
    ):
        launch.again()
    assert not (here / "begun").exists()


# The launcher's own exit code is not enough: with 0, there may still be no artifact
NO_END = "before the first process finished"


@pytest.mark.parametrize(
    ("launcher", "kind", "message"),
    [
        ("'unclosed", ConfigError, "cannot be started"),
        ("/nowhere/torchrun", ConfigError, "cannot be started"),
        *(
            (f"sh -c 'exit {code}'", SfumatoError, f"ended with exit code {code} {NO_END}")
            for code in (0, 3, 77)
        ),
    ],
)
def test_a_launch_without_a_first_process_is_an_error(launcher, kind, message, environment):
    environment[launch.LAUNCH] = launcher
    with pytest.raises(kind, match=message):
        launch.again()


def leaving(code: int, own: int) -> str:
    """Return a launcher that writes `code` as the stage's exit code, and ends with `own`.

    It also notes the path of the file to which it writes `code`.
    """
    noted = f"file = os.environ['{launch.EXIT_CODE}']; open('noted', 'a').write(file + chr(10))"
    return (
        f"{sys.executable} -c \"import os; {noted}; open(file, 'w').write('{code}'); raise "
        f'SystemExit({own})"'
    )


def test_an_interrupted_launcher_may_end_its_processes(environment, here):
    """`torchrun` starts its processes in new sessions, so no signal of a terminal reaches them."""
    ending = 'trap "sleep 0.5; touch ended; exit" TERM'
    environment[launch.LAUNCH] = f"sh -c '{ending}; touch begun; while :; do sleep 0.1; done'"

    def interrupt() -> None:
        while not (here / "begun").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        launch.again()
    assert (here / "ended").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can do this")
@pytest.mark.parametrize("killed", ["stage", "launcher"])
def test_no_process_outlives_a_killed_parent(killed, environment, here):
    (here / "dvc.yaml").touch()
    (here / "launcher.py").write_text(
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, *sys.argv[1:]], start_new_session=True)\n"
    )
    environment[launch.LAUNCH] = f"{sys.executable} launcher.py"
    words = [sys.executable, "-c", "from stages import launch; launch.again()", "serve"]
    environment["PYTHONPATH"] = str(ROOT)
    with subprocess.Popen(words, stdout=subprocess.PIPE) as stage:
        assert b"http" in stage.stdout.readline()
        process = psutil.Process(stage.pid)
        if killed == "launcher":
            (process,) = process.children()
        process.kill()
        stage.communicate(timeout=10)  # returns once all processes have closed the pipe


def test_a_module_in_the_current_folder_does_not_run(environment, here, monkeypatch):
    (here / "stages").mkdir()
    (here / "stages" / "cli.py").write_text("open('ran', 'w')\n")
    environment[launch.LAUNCH] = sys.executable
    monkeypatch.setattr(sys, "argv", ["stage", "--help"])
    assert launch.again() == 0
    assert not (here / "ran").exists()


def test_the_first_process_determines_the_exit_code(environment):
    """`torchrun` itself would end with 1."""
    environment[launch.LAUNCH] = leaving(3, 1)
    assert launch.again() == 3


def test_the_exit_code_comes_by_the_state_directory(environment, here):
    """Rank 0 may be on another host, which has no access to this host's temporary folder."""
    environment[launch.LAUNCH] = leaving(0, 1)
    assert launch.again() == launch.again() == 0
    files = [Path(line) for line in (here / "noted").read_text().splitlines()]
    assert {file.parent for file in files} == {here / "state/launches"} and len(set(files)) == 2
    assert not any(file.exists() for file in files)
