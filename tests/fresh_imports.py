"""Run a program in a fork that imports this project again, but not the libraries.

A new process would import PyTorch and the other libraries again, which takes seconds.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path

OURS = ("sfumato", "stages")


def printed(
    program: str,
    folder: Path,
    root: Path,
    environment: Mapping[str, str],
    again: Iterable[str] = (),
) -> str:
    """Run a program in a fork, and return its output.

    folder: current folder of the program; root: folder from which it imports the project;
    environment: all its environment variables; again: further packages that it must import again.
    """
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
                sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
                forget({*OURS, *again})
                sys.path.insert(0, str(root))
                os.environ.clear()
                os.environ.update(environment)
                os.chdir(folder)
                exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        text = output.read().decode()
    assert os.waitstatus_to_exitcode(status) == 0, text
    return text


def forget(packages: set[str]) -> None:
    """Remove packages, with their modules, from those that are imported."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in packages:
            del sys.modules[name]
