import errno
import os
import shutil
import time

import pytest
from failing_reads import failing_opens

from sfumato.errors import ConfigError, DataError
from sfumato.storage.artifacts import (
    check_out,
    depends_on_charge,
    holds_release,
    merge_records,
    read_artifact,
    read_kept,
    write_empty,
    writing,
)

ONE = {"id": "1", "stage": "count"}
TWO = {"id": "2", "stage": "central"}


def make(path, stage="count", inputs=(), records=(ONE,), **more):
    with writing(path, stage, inputs, records, **more) as directory:
        (directory / "numbers.json").write_text("[1]")
        (directory / "inner").mkdir()
        (directory / "inner" / "more.txt").write_text(stage)
    return read_artifact(path, stage, allow_local=True)


def test_the_cost_travels_with_an_artifact_and_its_copy(tmp_path):
    count = make(tmp_path / "count")
    make(tmp_path / "central", "central", [count], [TWO])
    shutil.copytree(tmp_path / "central", tmp_path / "copied")
    free = make(tmp_path / "pretrain", "pretrain", [read_artifact(tmp_path / "copied"), count], [])
    assert set(free.records) == {"1", "2"}  # a diamond: count is reached twice and counts once


def test_a_query_run_twice_costs_twice(tmp_path):
    once = make(tmp_path / "x")
    again = make(tmp_path / "y", records=[{**ONE, "id": "9"}])
    assert set(merge_records([once, again])) == {"1", "9"}
    with pytest.raises(DataError, match="edited"):
        merge_records([once, make(tmp_path / "z", records=[{**ONE, "stage": "other"}])])


@pytest.mark.parametrize("damage", ["change", "remove", "add", "truncate"])
def test_files_that_no_longer_fit_are_named(tmp_path, damage):
    make(tmp_path / "count")
    file = tmp_path / "count" / ("privacy.json" if damage == "truncate" else "numbers.json")
    if damage == "remove":
        file.unlink()
    elif damage == "add":
        (tmp_path / "count" / "extra.npy").write_bytes(b"x")
    else:
        file.write_text("[2" if damage == "change" else "{")
    with pytest.raises(DataError, match="numbers.json|extra.npy|privacy.json"):
        read_artifact(tmp_path / "count", "count")


def test_a_hole_of_a_terabyte_is_refused_before_it_is_read(tmp_path):
    """A sparse file costs its maker nothing, but hashing it would take half an hour.

    The test fails if reading takes 5 seconds or more.
    """
    with writing(tmp_path / "a", "pretrain") as directory:
        (directory / "weights.safetensors").write_bytes(b"as small as it should be")
    os.truncate(tmp_path / "a" / "weights.safetensors", 2**40)
    began = time.process_time()
    with pytest.raises(DataError, match="weights.safetensors has 1024 GiB"):
        read_artifact(tmp_path / "a")
    assert time.process_time() - began < 5


def test_missing_and_mistaken_directories_are_named(tmp_path):
    with pytest.raises(DataError, match="stage count"):
        read_artifact(tmp_path / "count", "count")
    make(tmp_path / "count")
    with pytest.raises(DataError, match="not by `central`"):
        read_artifact(tmp_path / "count", "central")


def test_a_local_input_makes_all_that_follows_local(tmp_path):
    local = make(tmp_path / "count", local=True)
    later = make(tmp_path / "pretrain", "pretrain", [local], [])
    assert later.local
    with pytest.raises(DataError, match="local"):
        read_artifact(tmp_path / "pretrain", "pretrain")


def test_a_failing_block_leaves_only_the_old_artifact(tmp_path):
    make(tmp_path / "count")
    with (
        pytest.raises(RuntimeError),
        writing(tmp_path / "count", "count", records=[TWO]) as directory,
    ):
        (directory / "half").write_text("x")
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["count"]
    assert set(read_artifact(tmp_path / "count", "count").records) == {"1"}


def test_what_is_no_artifact_is_never_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    for write in (lambda: write_empty(tmp_path / "mine", "count"), lambda: make(tmp_path / "mine")):
        with pytest.raises(ConfigError, match="--out"):
            write()
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_a_link_is_refused_before_anything_is_spent(tmp_path):
    """The artifact, a directory, cannot replace a link. A folder above it may be a link."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "artifacts").symlink_to("elsewhere")
    make(tmp_path / "artifacts" / "count")
    (tmp_path / "central").symlink_to("elsewhere")
    with pytest.raises(ConfigError, match="central is a link: remove it"):
        check_out(tmp_path / "central", "central")


def test_the_empty_artifact_has_constant_bytes(tmp_path):
    for name in "ab":
        write_empty(tmp_path / name, "central")
    assert (tmp_path / "a" / "privacy.json").read_bytes() == (
        tmp_path / "b" / "privacy.json"
    ).read_bytes()
    artifact = read_artifact(tmp_path / "a", "central")
    assert not artifact.enabled and artifact.records == {}


@pytest.mark.parametrize(
    "ask",
    [
        lambda path: read_artifact(path, "count"),
        lambda path: depends_on_charge(path, "1"),
        lambda path: check_out(path, "count"),
        lambda path: holds_release(path, "count", "1", None),
        lambda path: read_kept(path, "count", None, "again"),
    ],
)
def test_a_failing_disk_is_no_answer_about_an_artifact(tmp_path, ask):
    """A disk error does not mean, for example, that the artifact is another's, that nothing was
    paid for it, or that its kept copy is lost.
    """
    path = make(tmp_path / "count").path
    ask(path)
    with failing_opens("privacy.json"), pytest.raises(OSError) as error:
        ask(path)
    assert error.value.errno == errno.EIO


def test_an_unlistable_folder_is_not_a_missing_file(tmp_path):
    path = make(tmp_path / "count").path
    with failing_opens("count/inner"), pytest.raises(OSError):
        read_artifact(path, "count")
