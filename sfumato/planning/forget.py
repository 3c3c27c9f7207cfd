"""What is kept of a dataset besides its journal, and its end: the private copy, caches, checkpoints, kept releases."""

import re
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from filelock import FileLock, Timeout

from sfumato.data.duplicates import ORIGIN
from sfumato.data.prepare import UNNAMED
from sfumato.data.sources.packed import remove_unpacked
from sfumato.data.survey import LOOKED
from sfumato.errors import BudgetError, explained
from sfumato.evaluation.comparison import EVALUATIONS
from sfumato.privacy.odometer import LOCAL_USE, Odometer

FORGOTTEN = "forget"  # purpose of the entry in the journal
STAYS = (ORIGIN, UNNAMED)  # against a second name of the same folder, and a second version of the same images


def private_files(state: Path, dataset_id: str) -> dict[str, list[Path]]:
    """All that `forget` deletes below the state directory, by what it is. Raises BudgetError for a broken journal."""
    odometer = Odometer(state, dataset_id)
    home = odometer.images
    unfinished = re.compile(rf"\.{re.escape(dataset_id)}\.(\d+(-\w+)?\.tmp|old)")
    copies = [path for path in home.parent.glob(".*") if unfinished.fullmatch(path.name)]
    runs = (state / "runs" / run for run in odometer.runs())
    evaluations = (state / EVALUATIONS).glob("*")
    named = f'"dataset": "{dataset_id}"'
    of_any = LOOKED, "printed.txt", "refused.txt"  # of any dataset
    return {
        "private copy": [*(path for path in sorted(home.glob("*")) if path.name not in STAYS), *copies],
        "kept releases and checkpoints": [run for run in runs if run.exists()],
        "numbers from real images": [file for file in evaluations if named in file.read_text("utf-8", "replace")],
        "what was printed or looked at": [path for name in of_any for path in state.glob(f"*{name}*")],
    }


def forget(state: Path, dataset_id: str, here: Iterable[Path] = ()) -> None:
    """Delete `private_files`, then what is `here` in a project. The journal stays, says so, and counts as before.

    It may be killed at any time and called again. Raises BudgetError if another process works with the images.
    """
    odometer = Odometer(state, dataset_id)
    home = odometer.images
    with odometer.locked(), ExitStack() as stack:
        for lock in [home.with_name(f".{home.name}.lock"), *(state / "runs" / run / "lock" for run in odometer.runs())]:
            held = f"{lock} is held by another process, which works with {dataset_id!r}: wait for it, or stop it"
            with explained(BudgetError, lambda _, held=held: held, causes=(Timeout,)):  # type: ignore[misc]
                if lock.parent.exists():
                    stack.enter_context(FileLock(lock, blocking=False))
        for paths in private_files(state, dataset_id).values():
            delete(paths)
        remove_unpacked(state)
        odometer.append(LOCAL_USE, purpose=FORGOTTEN)
    delete(here)


def delete(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
