"""`dvc.lock` and DVC's own lock after a kill: `stage doctor` names what is damaged, and the
remedy.
"""

import json
import os
from pathlib import Path

import pytest
import yaml
from small_lock import commit_lock, write_lock_of_another_machine

from sfumato.settings.stage import LOCK
from stages.doctor import index_in_words
from stages.dvc_lock import COPY, damage, keep_copy, lock_in_words


@pytest.fixture
def desk(desk):
    Path("dvc.yaml").touch()
    return desk


def test_the_doctor_names_an_empty_lock_and_its_cure(desk):
    desk.run("doctor", "free")
    lock = Path(".dvc/tmp/rwlock")
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert "rm .dvc/tmp/rwlock" in " ".join(desk.run("doctor").replace("│", " ").split())
    lock.write_text("{}")
    assert "damaged" not in desk.run("doctor")


def test_the_doctor_names_an_index_that_others_can_change(here, environment, uninstall):
    """Any account that can write into DVC's index can run code as the owner."""
    environment.pop("DVC_SITE_CACHE_DIR", None)
    own = here / "state" / "dvc"
    own.mkdir(parents=True)
    remedy = f"run `dvc config --local core.site_cache_dir {own}`"
    assert "run `dvc init`" in index_in_words(own)  # `dvc config` would fail
    (here / ".dvc").mkdir()
    text = index_in_words(own)
    assert text.startswith("/var/tmp/dvc is not") and remedy in text
    config = here / ".dvc/config.local"
    config.write_text(f"[core]\n    site_cache_dir = {here / 'moved' / 'dvc'}\n")
    assert remedy in index_in_words(own)
    config.write_text(f"[core]\n    site_cache_dir = {own}\n")
    assert index_in_words(own) == str(own)
    for folder, mode in ((own, 0o1777), (own.parent, 0o777)):
        folder.chmod(mode)
        assert f"run `chmod o-w {folder}`" in index_in_words(own)
        folder.chmod(0o700)
    uninstall("dvc")
    assert "DVC is not installed" in index_in_words(own)


def test_a_lock_without_a_former_dependency_is_intact(desk):
    COPY.parent.mkdir(parents=True)
    entry = {"cmd": "true", "deps": [], "outs": []}
    for given in (entry, {"cmd": "true", "outs": []}):
        LOCK.write_text(yaml.safe_dump({"stages": {"prepare-sensitive": given}}))
        keep_copy()
        assert damage() is None and COPY.read_bytes() == LOCK.read_bytes()


def test_an_older_commit_with_fewer_stages_is_no_damage(desk):
    """An example is the state after `git checkout` of a commit from the middle of the first run."""
    write_lock_of_another_machine(())
    whole = LOCK.read_text()
    LOCK.write_text(whole[: whole.index("  central:")])
    commit_lock()
    COPY.parent.mkdir(parents=True)
    COPY.write_text(whole)
    assert damage() is None
    keep_copy()
    assert COPY.read_bytes() == LOCK.read_bytes()


def test_the_doctor_names_an_ended_program_of_a_reused_id(desk):
    lock = Path(".dvc/tmp/rwlock")
    lock.parent.mkdir(parents=True)
    named = {"pid": os.getpid(), "cmd": "/opt/sfumato/bin/dvc repro never"}
    lock.write_text(json.dumps({"write": {"/project/artifacts/count": named}}))
    said = " ".join(desk.run("doctor").replace("│", " ").split())
    assert f"PID {os.getpid()} (/opt/sfumato/bin/dvc repro never), which has ended" in said
    assert "rm .dvc/tmp/rwlock" in said
    # A process number that is a text counts as damage
    lock.write_text(json.dumps({"write": {"/project/artifacts/count": {"pid": "1"}}}))
    desk.run("doctor", "damaged")


def test_a_cut_dvc_lock_is_restored_from_its_copy(desk):
    assert lock_in_words() == "does not exist yet"
    write_lock_of_another_machine(())
    whole = LOCK.read_bytes().replace(b"hash: md5", b"hash: md5\n      nfiles: 31")
    LOCK.write_bytes(whole)
    keep_copy()  # without DVC, there is no folder for the copy
    assert not COPY.exists() and lock_in_words() == "intact"
    COPY.parent.mkdir(parents=True)
    keep_copy()
    assert COPY.read_bytes() == whole
    for length in range(0, len(whole), 97):  # DVC may be stopped at any byte
        LOCK.write_bytes(whole[:length])
        keep_copy()
        assert COPY.read_bytes() == whole and damage() is not None
    assert "cp .dvc/tmp/whole.lock dvc.lock" in " ".join(
        desk.run("doctor").replace("│", " ").split()
    )
    LOCK.write_bytes(whole.replace(b"nfiles: 31", b"nfiles: 32"))  # DVC continues
    keep_copy()
    assert COPY.read_bytes() == LOCK.read_bytes() and lock_in_words() == "intact"
