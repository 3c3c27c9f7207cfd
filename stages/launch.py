"""Run a stage in many processes: restart the command under the launcher in `SFUMATO_LAUNCH`, such
as `torchrun`.
"""

import ctypes
import os
import secrets
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

from sfumato.errors import ConfigError, SfumatoError, explained
from sfumato.storage.access import log_access
from sfumato.storage.state_directory import state_dir

LAUNCH = "SFUMATO_LAUNCH"
# Environment variable: path of the file to which the first process writes its exit code
EXIT_CODE = "SFUMATO_EXIT_CODE"
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def is_configured() -> bool:
    return bool(os.environ.get(LAUNCH))


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. Only Linux can do this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def again(stdout: IO[str] | None = None, stderr: IO[str] | None = None) -> int:
    """Rerun this command in many processes.

    stdout, stderr: streams for the new processes, None for the streams of this process. Returns the
    exit code of the first process. `torchrun` itself would return 1 for every failure.
    """
    launcher = f"{LAUNCH}={os.environ[LAUNCH]!r}"
    if EXIT_CODE in os.environ:
        raise ConfigError(
            f"{launcher} does not start a group of processes: set it to `torchrun` and its options"
        )
    code_file = state_dir() / "launches" / secrets.token_hex(8)
    code_file.parent.mkdir(0o700, parents=True, exist_ok=True)
    try:
        with explained(ConfigError, lambda error: f"{launcher} cannot be started: {error}"):
            words = [*shlex.split(os.environ[LAUNCH]), "-m", "stages.cli", *sys.argv[1:]]
            # PYTHONSAFEPATH: no module in the current folder can replace a package.
            environment = {**os.environ, EXIT_CODE: str(code_file), "PYTHONSAFEPATH": "1"}
            process = subprocess.Popen(
                words, env=environment, stdout=stdout, stderr=stderr, preexec_fn=die_with_parent
            )
        try:
            process.wait()
        finally:  # after Ctrl-C or SIGTERM, the launcher still runs: it must end its processes
            process.terminate()
            process.wait()
        if not code_file.is_file():
            raise SfumatoError(
                f"{launcher} ended with exit code {process.returncode} before the first process "
                "finished: correct the error that it printed, and run the command again"
            )
        return int(code_file.read_text(encoding="utf-8"))
    finally:
        code_file.unlink(missing_ok=True)


def speaks() -> bool:
    """Return whether this process prints. Of many processes, only the first one does."""
    return os.environ.get("RANK", "0") == "0"


def leave(code: int) -> None:
    """Exit with `code`.

    The first of many processes writes the code to a file and exits with 0, because `torchrun` would
    otherwise report a failure of its own.
    """
    if speaks():
        with suppress(OSError, SfumatoError):  # the state directory may be missing or read-only
            log_access(state_dir(), folder=os.getcwd(), command=sys.argv[1:], exit_code=code)
    code_file = os.environ.get(EXIT_CODE)
    if code_file and speaks():
        Path(code_file).write_text(str(code), encoding="utf-8")
        sys.exit(0)
    sys.exit(code)
