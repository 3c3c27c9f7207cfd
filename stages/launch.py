"""One stage in many processes: a command starts itself again under what `SFUMATO_LAUNCH` names, such as `torchrun`."""

import os
import secrets
import shlex
import subprocess
import sys
from pathlib import Path

from sfumato.errors import ConfigError, SfumatoError, explained
from sfumato.storage.state_directory import state_dir

LAUNCH = "SFUMATO_LAUNCH"
EXIT_CODE = "SFUMATO_EXIT_CODE"  # names the file in which the first process leaves its exit code


def asked() -> bool:
    return bool(os.environ.get(LAUNCH))


def again() -> int:
    """Rerun this command in many processes. Returns the exit code of the first: `torchrun` turns every one into 1."""
    launcher = f"{LAUNCH}={os.environ[LAUNCH]!r}"
    if EXIT_CODE in os.environ:
        raise ConfigError(f"{launcher} does not start a group of processes: set it to `torchrun` and its options")
    said = state_dir() / "launches" / secrets.token_hex(8)
    said.parent.mkdir(0o700, parents=True, exist_ok=True)
    try:
        with explained(ConfigError, lambda error: f"{launcher} cannot be started: {error}"):
            words = [*shlex.split(os.environ[LAUNCH]), "-m", "stages.cli", *sys.argv[1:]]
            # nothing in the current folder takes the place of a package
            given = {**os.environ, EXIT_CODE: str(said), "PYTHONSAFEPATH": "1"}
            done = subprocess.run(words, env=given, check=False)
        if not said.is_file():
            raise SfumatoError(f"{launcher} ended with exit code {done.returncode} before the first process finished")
        return int(said.read_text(encoding="utf-8"))
    finally:
        said.unlink(missing_ok=True)


def speaks() -> bool:
    """Whether this process prints progress: the only one, or the first of many."""
    return os.environ.get("RANK", "0") == "0"


def leave(code: int) -> None:
    """Exit. The first of many processes leaves its code in a file, and `torchrun` then has no failure to report."""
    said = os.environ.get(EXIT_CODE)
    if said and speaks():
        Path(said).write_text(str(code), encoding="utf-8")
        sys.exit(0)
    sys.exit(code)
