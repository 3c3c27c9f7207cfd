"""`SFUMATO_LAUNCH` in one process: what a launcher must start, and which exit code is the stage's."""

import subprocess
import sys
from pathlib import Path

import pytest

from sfumato.errors import ConfigError, SfumatoError
from stages import launch


@pytest.fixture(autouse=True)
def state(here) -> Path:
    return here / "state"


def test_a_launcher_that_starts_the_command_itself_ends_at_the_first_level(monkeypatch):
    """`python` would start itself without end."""
    monkeypatch.setenv(launch.LAUNCH, "python")
    monkeypatch.setenv(launch.EXIT_CODE, "of the first level")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("one more level"))
    with pytest.raises(ConfigError, match="starts no group of processes: name `torchrun`"):
        launch.again()


NO_END = "and the first process did not come to an end"  # its own exit code says nothing: 0 may leave no artifact


@pytest.mark.parametrize(
    ("launcher", "kind", "message"),
    [
        ("'unclosed", ConfigError, "does not start"),
        ("/nowhere/torchrun", ConfigError, "does not start"),
        *((f"sh -c 'exit {code}'", SfumatoError, f"ended with {code}, {NO_END}") for code in (0, 3, 77)),
    ],
)
def test_a_launch_without_a_start_or_an_end_of_the_first_process_is_an_error(launcher, kind, message, monkeypatch):
    monkeypatch.setenv(launch.LAUNCH, launcher)
    with pytest.raises(kind, match=message):
        launch.again()


def test_the_exit_code_is_that_of_the_first_process(monkeypatch):
    """`torchrun` turns each into 1."""
    text = f"import os; open(os.environ['{launch.EXIT_CODE}'], 'w').write('3'); raise SystemExit(1)"
    monkeypatch.setenv(launch.LAUNCH, f'{sys.executable} -c "{text}"')
    assert launch.again() == 3


def test_the_exit_code_comes_by_the_state_directory_which_all_hosts_share_under_an_id_of_its_own(monkeypatch, state):
    """Rank 0 may be on another host, where no temporary folder of this one is."""
    files = []

    def run(words, env, check):
        files.append(Path(env[launch.EXIT_CODE]))
        files[-1].write_text("0")
        return subprocess.CompletedProcess(words, 1)

    monkeypatch.setenv(launch.LAUNCH, "srun torchrun")
    monkeypatch.setattr(subprocess, "run", run)
    assert launch.again() == launch.again() == 0
    assert {file.parent for file in files} == {state / "launches"} and len(set(files)) == 2
    assert not any(file.exists() for file in files)
