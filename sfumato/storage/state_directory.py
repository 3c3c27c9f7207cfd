"""The private state directory, and whether git would take a file of it."""

import functools
import os
import subprocess
from pathlib import Path

from platformdirs import user_state_path

from sfumato.errors import ConfigError


def state_dir() -> Path:
    """Where sensitive bytes, keys, journals and checkpoints live: $SFUMATO_STATE, or the user's state directory."""
    named = os.environ.get("SFUMATO_STATE")
    path = Path(named or user_state_path("sfumato"))
    if named and not path.is_absolute():
        raise ConfigError(f"SFUMATO_STATE={named} is relative, so the odometer would vary: give the whole path")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"the state directory {path} is a file: name a folder in SFUMATO_STATE")
    if in_git(path / "keys"):
        remedy = "ignore it (a line in .gitignore), or set SFUMATO_STATE to a place outside the repository"
        raise ConfigError(f"git would take the state directory {path}, with real images and keys: {remedy}")
    return path


def git(*words: str) -> tuple[int, str]:
    """Exit code and standard output of git; 127 without git."""
    try:
        done = subprocess.run(
            ["git", "-c", "safe.directory=*", *words], capture_output=True, errors="replace", check=False, timeout=60
        )
    except OSError:
        return 127, ""
    return done.returncode, done.stdout


@functools.cache
def in_git(path: Path) -> bool:
    """Whether git would take a file: it lies in a work tree that does not ignore it, as far as git can say."""
    path = path.resolve()
    root = next((folder for folder in path.parents if (folder / ".git").exists()), None)
    return root is not None and git("-C", str(root), "check-ignore", "-q", str(path))[0] != 0
