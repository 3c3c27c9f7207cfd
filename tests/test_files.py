"""Files are whole or not there; what a kill left is swept; what is private stays so."""

import os
import stat
import subprocess
import sys

import pytest

from sfumato.files import check_writable, copy_directory, keep_private, replace_file, replacing, replacing_directory


def dead_process() -> int:
    """The id of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    return child.pid


def test_a_file_is_the_old_one_or_the_new_one(tmp_path):
    replace_file(tmp_path / "new" / "a.json", b"old")
    with pytest.raises(RuntimeError), replacing(tmp_path / "new" / "a.json") as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert (tmp_path / "new" / "a.json").read_bytes() == b"old"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


def test_a_directory_is_the_old_one_or_the_new_one(tmp_path):
    with replacing_directory(tmp_path / "a") as directory:
        (directory / "old").write_text("x")
    with pytest.raises(RuntimeError), replacing_directory(tmp_path / "a") as directory:
        (directory / "new").write_text("x")
        raise RuntimeError
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "old"]
    copy_directory(tmp_path / "a", tmp_path / "b" / "c")
    assert (tmp_path / "b" / "c" / "old").read_text() == "x"


def test_what_a_killed_process_left_is_swept_and_nothing_else(tmp_path):
    living = tmp_path / f".count.{os.getppid()}.tmp"
    dead = [tmp_path / f".{name}.{dead_process()}.tmp" for name in ("count", "central")]
    for path in (living, *dead):
        path.mkdir()
        (path / "half").write_text("x")
    (tmp_path / "count").mkdir()
    check_writable(tmp_path / "count")
    assert not dead[0].exists() and dead[1].exists() and living.exists() and (tmp_path / "count").exists()


def test_where_nothing_can_be_written_is_an_error_that_names_the_place(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="file"):
        check_writable(tmp_path / "file" / "out")


def test_a_private_folder_is_its_owner_s_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        (tmp_path / "local").mkdir()
        (tmp_path / "local" / "faces.png").write_bytes(b"x")
        keep_private(tmp_path / "local")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "local", tmp_path / "local" / "faces.png")]
    assert modes == [0o700, 0o600]
