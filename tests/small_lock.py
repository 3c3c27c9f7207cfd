"""Write `dvc.lock` as DVC does, for the stages whose files are in the current folder."""

import subprocess
from collections.abc import Collection
from pathlib import Path

import yaml

from sfumato.privacy.check import empty_artifact_md5
from sfumato.settings.stage import LOCK
from sfumato.settings.stages import dvc_stages
from sfumato.storage.digest import md5_of_file, md5_of_folder


def locked(path: Path, off: Collection[str] = ()) -> dict:
    """Return the entry of a file or folder in the lock.

    off: the queries that are switched off. Their artifacts get the md5 of an empty artifact.
    Anything else that does not exist gets an md5 of zeros.
    """
    if path.name in off:
        md5 = empty_artifact_md5(path.name)
    elif path.exists():
        md5 = md5_of_folder(path) if path.is_dir() else md5_of_file(path)
    else:
        md5 = "0" * 32
    return {"path": str(path), "hash": "md5", "md5": md5}


def write_lock() -> None:
    """Write the lock of every stage whose outputs exist, for tests that run stages without DVC."""
    save_lock(
        {
            name
            for name, (_, _, writes) in dvc_stages().items()
            if all(Path(path).exists() for path in writes)
        }
    )


def write_lock_of_another_machine(off: Collection[str]) -> None:
    """Write the lock of a complete run whose artifacts do not exist here.

    off: the queries that were switched off.
    """
    save_lock(dvc_stages().keys(), off)


def save_lock(names: Collection[str], off: Collection[str] | None = None) -> None:
    """Write the entries of these stages.

    off: as in `locked`; None to also leave out dependencies that do not exist.
    """
    stages = {}
    for name, (commands, reads, writes) in dvc_stages().items():
        if writes and name in names:
            deps = [
                locked(Path(path), off or ())
                for path in reads
                if off is not None or Path(path).exists()
            ]
            outs = [locked(Path(path), off or ()) for path in writes]
            stages[name] = {"cmd": commands[0], "deps": deps, "outs": outs}
    LOCK.write_text(yaml.safe_dump({"schema": "2.0", "stages": stages}, sort_keys=False))


def commit_lock() -> None:
    """Commit the lock to a new git repository in the current folder."""
    who = ("-c", "user.name=Ann", "-c", "user.email=ann@example.org")
    for words in (("init", "-q"), ("add", str(LOCK)), (*who, "commit", "-qm", "lock")):
        subprocess.run(["git", *words], check=True)
