"""Record which processes work with real images.

Each process locks its own file, which `stage forget` checks.
"""

import atexit
import os
import platform
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import Timeout

from sfumato.errors import BudgetError
from sfumato.storage.locks import file_lock, holding

IN_USE = "in_use"  # Below the state directory: one folder of locks per dataset
ANY = ".any"  # Folder for work that may concern any dataset
# A process locks this file while it marks a dataset, and `stage forget` while it deletes files
GATE = ".gate.lock"

until_the_end = ExitStack()  # Locks of `use_until_the_end`
atexit.register(until_the_end.close)


@contextmanager
def in_use(state: Path, dataset_id: str = ANY) -> Iterator[None]:
    """Mark a dataset as in use until the block ends, so that `unused` refuses it.

    The mark also ends with the process, even if the process is killed. The call waits for a running
    `stage forget`, which may delete the images: check only inside the block whether they exist.
    """
    if not state.is_dir():  # nothing is stored, so there is nothing to delete
        yield
        return
    folder = state / IN_USE / dataset_id
    for directory in (folder.parent, folder):
        directory.mkdir(mode=0o700, exist_ok=True)
    # The random part distinguishes processes of several machines that share the directory.
    file = folder / f"{this_process()} {secrets.token_hex(4)}.lock"
    stack = ExitStack()
    owner = os.getpid()
    with holding(file_lock(folder.parent / GATE)):
        stack.enter_context(holding(file_lock(file, thread_local=False)))
    try:
        yield
    finally:
        if os.getpid() == owner:  # a forked child must not remove its parent's lock
            stack.close()
            file.unlink(missing_ok=True)


def use_until_the_end(state: Path, dataset_id: str = ANY) -> None:
    """Mark a dataset as in use until the `stage` command ends.

    If no `stage` command runs, the mark lasts until the process ends.
    """
    until_the_end.enter_context(in_use(state, dataset_id))


@contextmanager
def unused(state: Path, dataset_id: str) -> Iterator[None]:
    """Until the block ends, prevent all processes from starting to use a dataset.

    Raises BudgetError if a process uses the dataset already.
    """
    home = state / IN_USE
    home.mkdir(mode=0o700, exist_ok=True)
    with holding(file_lock(home / GATE)):
        for file in [*(home / dataset_id).glob("*.lock"), *(home / ANY).glob("*.lock")]:
            try:
                with holding(file_lock(file, blocking=False)):
                    pass
            except Timeout as error:
                user = file.stem.rpartition(" ")[0]
                raise BudgetError(
                    f"dataset {dataset_id!r} is in use by {user}: wait until that process ends, or "
                    "stop it"
                ) from error
            file.unlink(missing_ok=True)  # its process was killed
        yield


def this_process() -> str:
    """Describe this process, without option values, as in `stage evaluate (process 12 on pc)`."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:2]]
    program = " ".join(word for word in words if re.fullmatch(r"[a-z_.]{1,40}", word)) or "python"
    return f"{program} (process {os.getpid()} on {re.sub('[^A-Za-z0-9.-]', '_', platform.node())})"
