"""When Sfumato asks git about the state directory, git must not run a program that is set in the
repository of another account.
"""

import os
import pwd
import shutil
import subprocess
from pathlib import Path

import pytest

from sfumato.errors import BudgetError, ConfigError
from sfumato.privacy.project_ledger import ledgers
from sfumato.storage.state_directory import REFUSED, git, in_git, state_dir

STRANGER = 65534  # the id of no account
SETTINGS = {"user.name": "a", "user.email": "a@b"}


def git_here(folder: Path, *words: str) -> None:
    named = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
    subprocess.run(["git", "-C", str(folder), *named, *words], check=True, capture_output=True)


def trapped(folder: Path) -> Path:
    """Make a repository that runs a program whenever git reads its index.

    Returns the file that the program writes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    git_here(folder, "init", "-q")
    marker = folder.parent / f"{folder.name}-ran"
    program = folder / ".git" / "program"
    program.write_text(f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o755)
    git_here(folder, "config", "core.fsmonitor", str(program))
    return marker


@pytest.fixture(params=["another account", "pretended"])
def given_away(request, environment, monkeypatch):
    """Return a function that gives folders to another account.

    It changes the owner, or only pretends to, as git's own tests do.
    """
    if request.param == "another account" and os.geteuid() != 0:
        pytest.skip("only root gives a folder away; the other variant runs everywhere")

    def give(*folders: Path, deep: Path | None = None) -> None:
        if request.param == "pretended":
            environment["GIT_TEST_ASSUME_DIFFERENT_OWNER"] = "1"
            given = {folder.stat().st_ino for folder in (*folders, *([deep] if deep else []))}
            mine = os.geteuid()
            stranger = max(os.geteuid(), 1) + 1
            pretend_owners(monkeypatch, given, mine, stranger)
            return
        for folder in folders:
            os.lchown(folder, STRANGER, STRANGER)
        for path in [deep, *deep.rglob("*")] if deep else []:
            os.lchown(path, STRANGER, STRANGER)

    return give


def pretend_owners(monkeypatch, given: set[int], mine: int, stranger: int) -> None:
    """Let `stat` and `lstat` of a path report a pretended owner: `stranger` if the file's inode
    number is in `given`, and `mine` otherwise.
    """

    def owned(whole):
        def answer(path, **more):
            found = whole(path, **more)
            fields = list(found)
            fields[4] = stranger if found.st_ino in given else mine
            return os.stat_result(fields)

        return answer

    for name in ("stat", "lstat"):
        monkeypatch.setattr(Path, name, owned(getattr(Path, name)))


def test_a_planted_repository_above_runs_nothing(tmp_path, given_away):
    scratch = tmp_path / "scratch"
    marker = trapped(scratch)
    state = scratch / "alice" / "state"
    state.mkdir(parents=True)
    given_away(scratch, deep=scratch / ".git")
    assert not in_git(state / "keys")
    assert not marker.exists()


def test_another_s_repository_in_an_own_folder_counts_as_taking(tmp_path, given_away):
    marker = trapped(tmp_path / "mine")
    (tmp_path / "mine" / ".gitignore").write_text("*\n")
    given_away(deep=tmp_path / "mine" / ".git")
    assert in_git(tmp_path / "mine" / "state" / "keys")
    assert not marker.exists()


def test_a_trusted_foreign_repository_still_answers(tmp_path, given_away, environment):
    """Git's settings mark the repository as trusted. Even so, the program that the repository names
    does not run.
    """
    shared = tmp_path / "shared"
    marker = trapped(shared)
    (shared / ".gitignore").write_text("/ignored/\n")
    given_away(shared, deep=shared / ".git")
    environment |= {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": str(shared),
    }
    assert in_git(shared / "state" / "keys") and not in_git(shared / "ignored" / "keys")
    assert not marker.exists()


def test_a_ledger_that_git_refuses_to_show_stops_the_spending(tmp_path, given_away):
    trapped(tmp_path / "project")
    (tmp_path / "project" / "ledger.json").write_text("{}")
    assert ledgers(tmp_path / "project") == [{}]
    given_away(tmp_path / "project", deep=tmp_path / "project" / ".git")
    with pytest.raises(BudgetError, match=r"another account owns.*safe\.directory"):
        ledgers(tmp_path / "project")


def test_own_repositories_answer_as_before_without_a_program(tmp_path):
    marker = trapped(tmp_path / "mine")
    (tmp_path / "mine" / ".gitignore").write_text("/ignored/\n")
    assert in_git(tmp_path / "mine" / "taken") and not in_git(
        tmp_path / "mine" / "ignored" / "keys"
    )
    assert not marker.exists()


def test_within_a_git_hook_the_folder_s_own_repository_answers(tmp_path, environment):
    """In a hook, git sets `GIT_DIR`, so git would use the hook's repository instead of the folder's
    own.
    """
    for name, ignored in (("asked", "state"), ("hook", "nothing")):
        trapped(tmp_path / name)
        (tmp_path / name / ".gitignore").write_text(f"/{ignored}/\n")
    environment |= {
        "GIT_DIR": str(tmp_path / "hook" / ".git"),
        "GIT_WORK_TREE": str(tmp_path / "hook"),
    }
    assert not in_git(tmp_path / "asked" / "state" / "keys")


def test_a_bare_repository_within_a_clone_is_not_used(tmp_path):
    """The settings of such a repository come with the clone, so any contributor can write them."""
    git_here(tmp_path, "init", "-q", "--bare", "planted")
    assert git("-C", str(tmp_path / "planted"), "rev-parse", "--git-dir")[0] != 0


def test_a_repositorys_program_fetches_no_missing_file(tmp_path):
    marker = tmp_path / "ran"
    origin = tmp_path / "origin"
    clone = tmp_path / "clone"
    origin.mkdir()
    git_here(origin, "init", "-q")
    (origin / "ledger.json").write_text('{"records": []}')
    git_here(origin, "add", ".")
    git_here(origin, "commit", "-qm", "a")
    git_here(origin, "config", "uploadpack.allowFilter", "true")
    git_here(
        tmp_path,
        "clone",
        "-q",
        "--no-checkout",
        "--filter=blob:none",
        f"file://{origin}",
        str(clone),
    )
    git_here(clone, "config", "remote.origin.uploadpack", f"touch {marker}; git-upload-pack")
    assert git("-C", str(clone), "show", "HEAD:./ledger.json")[0] not in (0, REFUSED)
    assert not marker.exists()
    if shutil.which("sh"):  # the trap works: plain git runs the program
        subprocess.run(["git", "-C", str(clone), "show", "HEAD:./ledger.json"], capture_output=True)
        assert marker.exists()


def test_an_account_without_a_home_directory_is_told_to_set_one(environment, monkeypatch):
    def no_account(number: int) -> None:
        raise KeyError(number)

    for name in ("SFUMATO_STATE", "HOME", "XDG_STATE_HOME"):
        environment.pop(name, None)
    monkeypatch.setattr(pwd, "getpwuid", no_account)
    with pytest.raises(ConfigError, match="no home directory: set HOME"):
        state_dir()
