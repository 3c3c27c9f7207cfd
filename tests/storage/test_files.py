"""Files are complete or absent, files of killed writers are removed, and private files stay
private.
"""

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from sfumato.storage import files
from sfumato.storage.files import (
    check_writable,
    copy_directory,
    keep_private,
    replace_file,
    replacing,
    replacing_directory,
    sweep,
    temporary_name,
    write_local,
)


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


def write_directory(path: Path) -> None:
    with replacing_directory(path) as directory:
        (directory / "x").write_text("whole")


@pytest.mark.parametrize(
    "write", [check_writable, write_directory, lambda path: replace_file(path, b"whole")]
)
@pytest.mark.parametrize("folder", [False, True])
def test_writing_again_sweeps_a_killed_writers_files(tmp_path, write, folder):
    """For a plan, or a stage that is switched off, nothing else would remove these files."""
    living = tmp_path / f".a.{os.getppid()}.tmp"
    mine, other = (tmp_path / f".{name}.{dead_process()}.tmp" for name in ("a", "b"))
    for path in (living, mine, other):
        path.mkdir() if folder else path.touch()
    write(tmp_path / "a")
    left = {path.name for path in tmp_path.iterdir()} - {"a"}
    assert left == {living.name, other.name} and (tmp_path / "a").exists() == (
        write is not check_writable
    )


def test_a_killed_containers_files_are_swept(tmp_path, monkeypatch):
    """In the next container, the process number belongs to another program, which began after the
    file was last changed.
    """
    left = tmp_path / f".a.{os.getpid()}-1.tmp"
    left.touch()
    sweep(tmp_path / "a")
    assert left.exists()
    age = time.time() - psutil.Process().create_time()
    # As if the file were a minute older than this process
    monkeypatch.setattr(files, "CLOCK_SKEW", -age - 60)
    sweep(tmp_path / "a")
    assert not left.exists()


def test_no_temporary_name_is_used_twice(tmp_path):
    assert len({temporary_name(tmp_path / "a") for _ in range(100)}) == 100


def test_an_unwritable_place_is_named_in_the_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="file"):
        check_writable(tmp_path / "file" / "out")


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_folder_is_its_owners_under_any_umask(tmp_path, no_umask):
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "faces.png").write_bytes(b"x")
    keep_private(tmp_path / "local")
    assert mode(tmp_path / "local") == 0o700 and mode(tmp_path / "local" / "faces.png") == 0o600


def test_every_writer_of_local_numbers_keeps_them_private(tmp_path, no_umask):
    write_local(tmp_path / "local.csv", b"x")
    assert mode(tmp_path / "local.csv") == 0o600
    root = Path(__file__).resolve().parents[2]
    writers = ("stages/evaluate.py", "benchmarks/compare_runs.py", "stages/report.py")
    for name in (*writers, "sfumato/evaluation/plots.py", "benchmarks/utility.py"):
        text = (root / name).read_text()
        others = ("replace_file", "write_json", "write_bytes")
        assert "write_local(" in text and not any(word in text for word in others), name


def test_weights_that_do_not_fit_on_disk_are_one_error_line(tmp_path):
    """The weights are saved in another process, which may write no file of more than 1000 bytes."""
    program = (
        "import resource, sys, torch\n"
        "from pathlib import Path\n"
        "from sfumato.storage.weights import save_tensors\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    save_tensors({'x': torch.zeros(10_000)}, Path(sys.argv[1]))\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "weights")]
    text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert (
        text.count("\n") == 1
        and text.startswith(f"{tmp_path / 'weights'}: ")
        and "too large" in text
    )


def test_a_directory_that_cannot_be_copied_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match="a cannot be copied to .*b: .*No such file"):
        copy_directory(tmp_path / "a", tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_query_leaves_no_core_dump():
    """The test uses another process, and first raises the limit of that process as far as
    possible.
    """
    program = (
        "import resource\n"
        "from stages.runner import keep_memory_off_disk\n"
        "hard = resource.getrlimit(resource.RLIMIT_CORE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))\n"
        "keep_memory_off_disk()\n"
        "assert resource.getrlimit(resource.RLIMIT_CORE) == (0, hard)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("write", [replacing, replacing_directory])
def test_a_full_disk_names_the_file_that_was_written(write, tmp_path):
    with (
        pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/a'"),
        write(tmp_path / "a"),
        open("/dev/full", "wb", 0) as full,
    ):
        full.write(b"0")
    assert [*tmp_path.iterdir()] == []


def test_two_threads_writing_one_file_do_not_mix(tmp_path):
    path = tmp_path / "a.json"
    names = []
    with replacing(path) as mine:
        other = threading.Thread(target=lambda: names.append(temporary_name(path)))
        other.start()
        other.join()
        mine.write_text("whole")
        assert names[0] != mine and names[0].parent == mine.parent
    assert path.read_text() == "whole"
    names[0].with_name(names[0].name.replace(f"{os.getpid()}-", f"{dead_process()}-")).touch()
    sweep(path)
    assert [*tmp_path.iterdir()] == [path]
