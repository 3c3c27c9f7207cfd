"""The private state directory, and whether git would take a file of it."""

import functools
import os
import subprocess
from pathlib import Path

from platformdirs import user_state_path

from sfumato.errors import ConfigError

CAUTION = ("-c", "safe.bareRepository=explicit", "-c", "core.fsmonitor=false")  # no program of a repository is run
NAMING_A_REPOSITORY = (  # set within a git hook: another one would answer, and without git's question who owns it
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE"),
    *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE"),
)
REFUSED = 126
DVC_INDEX = "dvc"  # below the state directory, as the Makefile and the container name it too


def state_dir() -> Path:
    """Where sensitive bytes, keys, journals and checkpoints live: $SFUMATO_STATE, or the user's state directory."""
    named = os.environ.get("SFUMATO_STATE")
    path = Path(named or user_state_path("sfumato"))
    if named and not path.is_absolute():
        raise ConfigError(f"SFUMATO_STATE={named} is relative, so the odometer would vary: give the whole path")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"the state directory {path} is a file: name a folder in SFUMATO_STATE")
    if in_git(path / "keys"):
        remedy = (
            "ignore it (a line in .gitignore), or set SFUMATO_STATE to a place outside the repository; only the latter "
            "helps if another account owns the repository"
        )
        raise ConfigError(f"git would take the state directory {path}, with real images and keys: {remedy}")
    return path


def git(*words: str) -> tuple[int, str]:
    """Exit code and standard output of git; 127 without git, REFUSED for the repository of another account.

    A repository can name programs, which git would run as this account (CVE-2022-24765): git's own safeguard stays.
    """
    environment = {name: value for name, value in os.environ.items() if name not in NAMING_A_REPOSITORY}
    environment["GIT_ALLOW_PROTOCOL"] = "none"  # a file that is missing would be fetched, by the repository's program
    try:
        done = subprocess.run(
            ["git", *CAUTION, *words], capture_output=True, errors="replace", check=False, timeout=60, env=environment
        )
    except OSError:
        return 127, ""
    if done.returncode != 0 and "safe.directory" in done.stderr:  # the remedy that git names, in every language
        return REFUSED, ""
    return done.returncode, done.stdout


@functools.cache
def in_git(path: Path) -> bool:
    """Whether git would take a file: it lies in a work tree that does not ignore it, as far as git can say.

    A repository that git refuses as another account's counts as one that takes the file, unless it is `is_foreign`,
    such as one that somebody put into a shared folder above: git takes nothing there.
    """
    path = path.resolve()
    root = next((folder for folder in path.parents if (folder / ".git").exists()), None)
    if root is None:
        return False
    code, _ = git("-C", str(root), "check-ignore", "-q", str(path))
    return code != 0 and not (code == REFUSED and is_foreign(root))


def is_foreign(root: Path) -> bool:
    """Whether a third account, neither this one nor root, put the repository into a folder that is not this one's."""
    if not hasattr(os, "geteuid"):  # Windows, which has no such numbers
        return False
    this = os.geteuid()
    return (root / ".git").lstat().st_uid not in (this, 0) and root.stat().st_uid != this
