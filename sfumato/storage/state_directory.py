"""The private state directory, and a check of whether git would track it."""

import functools
import os
import subprocess
from pathlib import Path

from platformdirs import user_state_path

from sfumato.errors import ConfigError, explained

# Options that prevent git from running programs that a repository names
CAUTION = ("-c", "safe.bareRepository=explicit", "-c", "core.fsmonitor=false")
# Variables that a git hook sets. With them, git would use another repository, and not check who
# owns it.
NAMING_A_REPOSITORY = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE"),
    *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE"),
)
REFUSED = 126
# Folder of DVC's index, below the state directory. The Makefile and the Dockerfile name it too
DVC_INDEX = "dvc"


def state_dir() -> Path:
    """Return the folder of prepared images, keys, journals and checkpoints.

    It is $SFUMATO_STATE, or the user's state directory.
    """
    setting = os.environ.get("SFUMATO_STATE")
    homeless = "this account has no home directory: set HOME to a folder to which you may write"
    with explained(ConfigError, homeless, causes=(RuntimeError,)):
        path = Path(setting or user_state_path("sfumato").expanduser())
    if setting and not path.is_absolute():
        raise ConfigError(
            f"SFUMATO_STATE={setting} is a relative path, so commands run in different folders "
            "would use different odometers: give an absolute path"
        )
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"the state directory {path} is a file: set SFUMATO_STATE to the path of a folder"
        )
    if in_git(path / "keys"):
        raise would_be_tracked(path)
    return path


def would_be_tracked(state: Path) -> ConfigError:
    return ConfigError(
        f"git would track the state directory {state}, which contains real images and keys: set "
        "SFUMATO_STATE to a folder outside the repository, or, if the repository belongs to you, "
        "add the state directory to .gitignore"
    )


def git(*words: str) -> tuple[int, str]:
    """Run git, and return its exit code and standard output.

    The code is 127 if git is missing, and REFUSED if the repository belongs to another account.
    Git's own check of the owner stays on, because a repository can name programs that git would run
    as this account (CVE-2022-24765).
    """
    environment = {
        name: value for name, value in os.environ.items() if name not in NAMING_A_REPOSITORY
    }
    # A repository can name a program that fetches missing objects. With this variable, git does not
    # run it.
    environment["GIT_ALLOW_PROTOCOL"] = "none"
    try:
        result = subprocess.run(
            ["git", *CAUTION, *words],
            capture_output=True,
            errors="surrogateescape",  # a path may contain any bytes
            check=False,
            timeout=60,
            env=environment,
        )
    except OSError:
        return 127, ""
    # git's message contains the name safe.directory in every language.
    if result.returncode != 0 and "safe.directory" in result.stderr:
        return REFUSED, ""
    return result.returncode, result.stdout


@functools.cache
def in_git(path: Path) -> bool:
    """Return whether git would track a file: it is in a work tree that does not ignore it.

    Git refuses to read a repository that another account owns. The file then counts as tracked,
    unless `is_foreign` is true, for example because another person made a repository in a parent
    folder that many accounts share.
    """
    path = path.resolve()
    root = next((folder for folder in path.parents if (folder / ".git").exists()), None)
    if root is None:
        return False
    code, _ = git("-C", str(root), "check-ignore", "-q", str(path))
    return code != 0 and not (code == REFUSED and is_foreign(root))


def is_foreign(root: Path) -> bool:
    """Return True if other accounts own a repository's folder `root` and `root/.git`.

    The superuser counts as another account for `root`, but not for `root/.git`.
    """
    if not hasattr(os, "geteuid"):  # Windows has no user ids
        return False
    this = os.geteuid()
    return (root / ".git").lstat().st_uid not in (this, 0) and root.stat().st_uid != this
