"""Check two files of DVC: `dvc.lock`, and the lock file of running `dvc` commands.

DVC damages these files if it is killed while it writes them. The project keeps a copy of
`dvc.lock`.
"""

from contextlib import suppress
from pathlib import Path

from sfumato.errors import UNREADABLE
from sfumato.planning.running import RUNNING, holders
from sfumato.settings.stage import LOCK
from sfumato.storage.documents import read_yaml
from sfumato.storage.files import replace_file
from sfumato.storage.state_directory import git

COPY = Path(".dvc/tmp/whole.lock")


def keep_copy() -> None:
    """Keep a copy of `dvc.lock` if `damage` finds no damage, such as a stage that is missing."""
    if LOCK.is_file() and COPY.parent.is_dir() and damage() is None:
        replace_file(COPY, LOCK.read_bytes())


def drop_stage(name: str) -> None:
    """Remove a stage from `dvc.lock`, so that the stage runs again."""
    from sfumato.settings.recipes import as_yaml  # imported late because it is slow

    with suppress(*UNREADABLE):
        content = read_yaml(LOCK)
        del content["stages"][name]
        COPY.unlink(missing_ok=True)
        replace_file(LOCK, as_yaml(content, blocks=True).encode())


def damage() -> str | None:
    """Describe the damage to `dvc.lock`, or return None if the file is intact."""
    try:
        stages = read_yaml(LOCK)["stages"]
        content = LOCK.read_bytes()
        if not content.endswith(b"\n"):
            return "it ends within a line"
        old_stages: dict[str, dict] = {}
        # An older commit that was checked out may have fewer stages than the copy
        if COPY.is_file() and git("show", f"HEAD:./{LOCK}") != (0, content.decode()):
            old_stages = read_yaml(COPY)["stages"]
            if content != COPY.read_bytes() and COPY.read_bytes().startswith(content):
                return "its last lines are missing"
        if lost_stages := [name for name in old_stages if name not in stages]:
            return f"the stage {lost_stages[0]!r} is missing"
        incomplete = [
            name
            for name, entry in stages.items()
            # DVC drops `deps` if the only dependency was a recipe of the project, now deleted
            if not {"cmd", *old_stages.get(name, ())} - {"deps"} <= {*entry}
        ]
        if incomplete:
            return f"a part of the stage {incomplete[0]!r} is missing"
        return None
    except UNREADABLE as error:
        return str(error) or type(error).__name__


def lock_in_words() -> str:
    if not LOCK.exists():
        return "does not exist yet"
    problem = damage()
    if problem is None:
        return "intact"
    cure = f"cp {COPY} {LOCK}" if COPY.is_file() else f"git checkout HEAD -- {LOCK}"
    return (
        f"damaged ({problem}), so every `dvc repro` fails. When no `dvc` command is running here, "
        f"run `{cure}`"
    )


def rwlock_in_words() -> str:
    """Describe the state of the lock file of running `dvc` commands.

    After a kill, it may be damaged or name a program that has ended.
    """
    try:
        ended = [holder for holder in holders() if not holder.runs]
    except FileNotFoundError:
        return "free"
    except UNREADABLE as error:
        return (
            f"damaged ({error}), so every `dvc repro` fails. When no `dvc` command is running "
            f"here, run `rm {RUNNING}`"
        )
    if ended:
        program = f"PID {ended[0].process} ({ended[0].command})"
        return (
            f"belongs to {program}, which has ended. If `dvc repro` waits and no other `dvc` "
            f"command is running here, run `rm {RUNNING}`"
        )
    return "intact"
