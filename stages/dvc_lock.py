"""DVC's files that a kill can damage: `dvc.lock`, of which a whole copy is kept, and its lock on what runs."""

from pathlib import Path
from typing import Any

from sfumato.errors import UNREADABLE
from sfumato.planning.running import RUNNING, holders
from sfumato.settings.stages import LOCK
from sfumato.storage.documents import read_yaml
from sfumato.storage.files import replace_file

COPY = Path(".dvc/tmp/whole.lock")


def keep_copy() -> None:
    """Keep a copy of `dvc.lock`, if there is one here, it is whole, and it lacks no stage that the copy has."""
    if LOCK.is_file() and COPY.parent.is_dir() and damage() is None:
        replace_file(COPY, LOCK.read_bytes())


def damage() -> str | None:
    """What is wrong with `dvc.lock`, or None. A cut one ends within a line, or lacks a stage or a part of one."""
    try:
        stages = read_yaml(LOCK)["stages"]
        content = LOCK.read_bytes()
        if not content.endswith(b"\n"):
            return "it ends within a line"
        had: Any = {}
        if COPY.is_file():
            had = read_yaml(COPY)["stages"]
            if content != COPY.read_bytes() and COPY.read_bytes().startswith(content):
                return "it ends before its last lines, which it had"
        if lost := [name for name in had if name not in stages]:
            return f"it lacks {lost[0]!r}, which it had"
        short = [name for name, one in stages.items() if "cmd" not in one or len(had.get(name, ())) > len(one)]
        return f"it lacks a part of {short[0]!r}, which it had" if short else None
    except UNREADABLE as error:
        return str(error) or type(error).__name__


def lock_in_words() -> str:
    if not LOCK.exists():
        return "not there yet"
    wrong = damage()
    if wrong is None:
        return "whole"
    cure = f"cp {COPY} {LOCK}" if COPY.is_file() else f"restore it from git (git checkout -- {LOCK})"
    return f"damaged ({wrong}), so every `dvc repro` fails. Once no dvc runs here: {cure}"


def rwlock_in_words() -> str:
    """Describe DVC's lock on what runs. A kill may leave it unreadable, or naming a program that ended."""
    try:
        ended = [holder for holder in holders() if not holder.runs]
    except FileNotFoundError:
        return "free"
    except UNREADABLE as error:
        return f"damaged ({error}), so every `dvc repro` fails. Once no dvc runs here: rm {RUNNING}"
    if ended:
        named = f"PID {ended[0].process} ({ended[0].command})"
        return f"names {named}, which has ended. If `dvc repro` is busy and no dvc runs here: rm {RUNNING}"
    return "whole"
