"""Delete the private files of a dataset: the copy of its images, caches, checkpoints and kept
releases.

The journal of the dataset is kept.
"""

import re
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import Timeout

from sfumato.data.cards import dataset_directory
from sfumato.data.duplicates import ORIGIN
from sfumato.data.prepare import CONVERTED, UNNAMED
from sfumato.data.sources.packed import remove_unpacked
from sfumato.data.survey import CACHE
from sfumato.errors import BudgetError, explained
from sfumato.evaluation.identity import EVALUATIONS
from sfumato.privacy.odometer import LOCAL_USE, Odometer
from sfumato.storage.files import delete, is_left_over
from sfumato.storage.in_use import unused
from sfumato.storage.locks import file_lock, holding

FORGOTTEN = "forget"  # purpose of the entry in the journal
# These files are kept, to detect a second name for the same folder, a second version of the same
# images, or other settings for the same version
STAYS = (CONVERTED, ORIGIN, UNNAMED)
# These files are deleted whenever a dataset is forgotten, because commands for any dataset may have
# written them. Versions before 0.4 wrote looked.json
CACHES = (CACHE, "looked.json", "printed.txt", "refused.txt")
OF_ANY = "withheld output, survey caches"


def datasets(state: Path) -> list[str]:
    """Return the ids of all datasets of a state directory, including forgotten ones."""
    journals = {
        path.stem for path in (*state.glob("odometer/*.jsonl"), *state.glob("keys/*.journal"))
    }
    return sorted(journals | {path.name for path in state.glob("data/[!.]*")})


def private_files(state: Path, dataset_id: str) -> dict[str, list[Path]]:
    """Return the files that `forget_dataset` deletes in the state directory, by kind.

    The unpacked archives, which `forget_dataset` deletes too, are not listed. An invalid journal is
    not an error here.
    """
    home = dataset_directory(state, dataset_id)
    unfinished = re.compile(rf"\.{re.escape(dataset_id)}\.(\d+(-\w+)?\.tmp|old|shards)")
    copies = [path for path in home.parent.glob(".*") if unfinished.fullmatch(path.name)]
    evaluations = (state / EVALUATIONS).glob("*")
    dataset_field = f'"dataset": "{dataset_id}"'
    return {
        "private copy": [
            *(path for path in sorted(home.glob("*")) if path.name not in STAYS),
            *copies,
        ],
        "kept releases and checkpoints": runs_of(state, dataset_id),
        "numbers from real images": [
            file
            for file in evaluations
            if is_left_over(file) or dataset_field in file.read_text("utf-8", "replace")
        ],
        OF_ANY: [path for name in CACHES for path in state.glob(f"*{name}*")],
    }


def runs_of(state: Path, dataset_id: str) -> list[Path]:
    """Return the folders of all runs in a dataset's journal, even if the journal is invalid.

    If entries of the journal may be lost, also return the folders of runs that no journal lists.
    """
    files = [
        file
        for file in (state / "odometer").glob("*")
        if file.suffix in (".jsonl", ".aside") and file.is_file()
    ]
    texts = {file.name: file.read_text("utf-8", "replace") for file in files}
    own_journal = re.compile(rf"{re.escape(dataset_id)}(\.jsonl|\.\d+\.aside)")
    own_text = "".join(text for name, text in texts.items() if own_journal.fullmatch(name))
    other_texts = "".join(text for name, text in texts.items() if not own_journal.fullmatch(name))
    odometer = Odometer(state, dataset_id)
    lost = True
    with suppress(BudgetError):
        lost = bool(odometer.entries()) and not odometer.complete()
    folders = sorted((state / "runs").glob("*"))
    return [
        run
        for run in folders
        if f'"{run.name}"' in own_text or (lost and f'"{run.name}"' not in other_texts)
    ]


def forgotten_on(state: Path, dataset_id: str) -> str | None:
    """Return the day on which a dataset was forgotten, if its journal is valid and has no later
    entry.
    """
    with suppress(BudgetError):
        newest = Odometer(state, dataset_id).entries()[-1:]
        if newest and newest[0].get("purpose") == FORGOTTEN:
            return f"{datetime.fromtimestamp(newest[0]['time'], UTC):%Y-%m-%d}"
    return None


def forget_dataset(state: Path, dataset_id: str, project_files: Iterable[Path] = ()) -> str | None:
    """Delete the `private_files` of a dataset and all unpacked archives, then `project_files`.

    project_files: files of the project to delete.

    The journal is kept. It records the deletion, and its charges still count.

    If the process is killed, call the function again. If the journal is invalid, it is not
    changed, and the reason is returned. Otherwise, returns None. Raises BudgetError if another
    process works with the images.
    """
    odometer = Odometer(state, dataset_id)
    home = odometer.images
    problem = None
    with odometer.locked(), unused(state, dataset_id), ExitStack() as stack:
        locks = [home.with_name(f".{home.name}.lock")]
        locks += [lock for run in runs_of(state, dataset_id) for lock in run.glob("*lock")]
        for lock in locks:
            message = (
                f"{lock} is locked by another process that works with {dataset_id!r}: wait until "
                "that process ends, or stop it"
            )
            with explained(BudgetError, message, causes=(Timeout,)):
                if lock.parent.exists():
                    stack.enter_context(holding(file_lock(lock, blocking=False)))
        for paths in private_files(state, dataset_id).values():
            delete(paths)
        remove_unpacked(state)
        try:
            odometer.entries()
        except BudgetError as error:
            problem = str(error)
        else:
            odometer.append(LOCAL_USE, purpose=FORGOTTEN)
    delete(project_files)
    return problem
