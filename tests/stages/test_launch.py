"""`SFUMATO_LAUNCH` in one process: what a launcher must start, and which exit code is the stage's."""

import subprocess
import sys

import pytest

from sfumato.errors import ConfigError, SfumatoError
from stages import launch


def test_a_launcher_that_starts_the_command_itself_ends_at_the_first_level(monkeypatch):
    """`python` would start itself without end."""
    monkeypatch.setenv(launch.LAUNCH, "python")
    monkeypatch.setenv(launch.EXIT_CODE, "of the first level")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("one more level"))
    with pytest.raises(ConfigError, match="starts no group of processes: name `torchrun`"):
        launch.again()


@pytest.mark.parametrize("launcher", ["'unclosed", "/nowhere/torchrun"])
def test_a_launcher_that_does_not_start_is_named(launcher, monkeypatch):
    monkeypatch.setenv(launch.LAUNCH, launcher)
    with pytest.raises(ConfigError, match="does not start"):
        launch.again()


@pytest.mark.parametrize("code", [0, 3, 77])
def test_a_launch_without_an_end_of_the_first_process_is_an_error(code, monkeypatch):
    """Its own exit code says nothing of the stage: 0 may leave no artifact."""
    monkeypatch.setenv(launch.LAUNCH, f"sh -c 'exit {code}'")
    with pytest.raises(SfumatoError, match=f"ended with {code}, and the first process did not come to an end"):
        launch.again()


def test_the_exit_code_is_that_of_the_first_process(monkeypatch):
    """`torchrun` turns each into 1."""
    text = f"import os; open(os.environ['{launch.EXIT_CODE}'], 'w').write('3'); raise SystemExit(1)"
    monkeypatch.setenv(launch.LAUNCH, f'{sys.executable} -c "{text}"')
    assert launch.again() == 3
