"""Decoding in several processes: the same pictures, order and messages, and an end when anything goes wrong."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from program import Terminal

from sfumato.data import decoding
from sfumato.data.decoding import decoded
from sfumato.data.prepare import prepare_sensitive
from sfumato.data.sources.source import Request
from sfumato.errors import DataError, SfumatoError
from sfumato.settings.data import Data, Groups

REQUEST = {"section": "data", "name": "imagefolder", "path": None, "size": (6, 6), "channels": 1}


def pictures(root: Path, broken=()) -> list[Path]:
    """90 pictures of 30 persons in three classes, some in colour and some in other proportions; `broken` are none."""
    for i in range(90):
        file = root / "abc"[i // 30] / f"P{i % 30:02}_{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        if i in broken:
            file.write_bytes(b"no picture")
        else:
            shape = (8, 8 + i % 3, 3)[: 2 + i % 2]
            Image.fromarray(np.random.default_rng(i).integers(0, 256, shape, dtype=np.uint8)).save(file)
    return sorted(root.glob("*/*"))


@pytest.fixture
def pool(monkeypatch) -> Callable[..., None]:
    """A function: how many processes decode, after how many seconds alone, and how loaded the machine is."""

    def change(processes: int = 2, alone: float = 0.0, load: float = 1.0) -> None:
        monkeypatch.setattr(decoding, "PROCESSES", processes)
        monkeypatch.setattr(decoding, "ALONE", alone)
        monkeypatch.setattr(decoding.os, "getloadavg", lambda: (load, 1.0, 1.0))

    change()
    return change


@pytest.fixture
def begun(monkeypatch, pool):
    """The processes that were begun: all pictures but one are left to them."""
    found = []

    class Noted(subprocess.Popen):
        def __init__(self, *args, **ways):
            super().__init__(*args, **ways)
            found.append(self)

    monkeypatch.setattr(decoding, "Popen", Noted)
    monkeypatch.setattr(decoding, "TURN", 1e-9)  # a picture at a time
    return found


@pytest.mark.parametrize("skip, broken", [("5%", (0, 44, 89)), ("1%", (3, 50, 88)), (0.0, ()), ("5%", (7,))])
def test_a_set_is_the_same_byte_by_byte_whatever_the_number_of_processes(tmp_path, begun, pool, skip, broken):
    pictures(tmp_path / "in", broken)
    ways = {"size": 6, "channels": 1, "skip": skip, "version": "one", "groups": Groups(pattern=r"(P\d+)_")}
    data = Data(dataset_id="set", source="imagefolder", path=str(tmp_path / "in"), **ways)
    outcomes = []
    for processes in (1, 2, 4):
        state = tmp_path / f"state{processes}"
        (state / "keys").mkdir(parents=True)
        (state / "keys/set").write_bytes(b"k" * 32)
        pool(processes)
        try:
            with redirect_stderr(Terminal()):  # where messages name files
                prepare_sensitive(data, state, tmp_path / "card.json", tmp_path)
            message = ""
        except DataError as error:
            message = str(error)
        home = state / "data/set"
        kept = {str(file.relative_to(home)): file.read_bytes() for file in home.rglob("*.*")}
        said = {name: value for name, value in kept.items() if name != "listing"}
        outcomes.append((message, said, (tmp_path / "card.json").exists()))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert bool(outcomes[0][0]) == (skip == "1%") and len(begun) > 5 and all(one.poll() is not None for one in begun)


def test_conversions_are_counted_once(tmp_path, begun, pool):
    files = pictures(tmp_path / "in")
    counted = []
    for processes in (1, 2, 4):
        pool(processes)
        request = Request(**REQUEST)
        assert len([*decoded(files, request)]) == 90
        counted.append(dict(request.converted))
    assert counted[0] == counted[1] == counted[2] == {"colour pictures made grey": 45, "cropped to the middle": 60}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_dies_is_an_error_and_the_others_end(tmp_path, begun, number):
    images = decoded(pictures(tmp_path / "in"), Request(**REQUEST))
    assert [next(images).shape for _ in range(5)] == [(6, 6, 1)] * 5
    begun[1].send_signal(number)
    begun[1].wait()
    with pytest.raises(DataError, match="a process that decodes pictures ended by itself") as error:
        list(images)
    assert not error.value.public  # off a terminal it is one constant sentence
    assert len(begun) == 2 and all(one.poll() is not None for one in begun)


def test_a_file_that_may_not_be_read_is_not_called_a_broken_picture(tmp_path, begun, monkeypatch):
    files = pictures(tmp_path / "in")

    def refused(path, *args):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(PermissionError) as error:
        list(decoded(files, Request(**REQUEST, skip=1.0)))
    assert error.value.filename == str(files[0]), "the first one stops it, whatever may be left out"


def test_who_reads_no_further_ends_them_all(tmp_path, begun):
    images = decoded(pictures(tmp_path / "in"), Request(**REQUEST))
    assert [next(images) for _ in range(5)] and len(begun) == 2
    images.close()
    assert all(one.poll() is not None for one in begun)


def test_a_mistake_that_is_no_picture_s_is_raised_as_in_one_process(tmp_path, begun, pool):
    """Such as 16 bits without a range: `stage init` asks for it."""
    files = pictures(tmp_path / "in")
    Image.fromarray(np.zeros((6, 6), np.uint16)).save(files[40])
    files[20].write_bytes(b"no picture")
    raised = []
    for processes in (1, 2):
        pool(processes)
        with pytest.raises(SfumatoError) as error:
            for number, image in enumerate(decoded(files, Request(**REQUEST))):
                assert isinstance(image, DataError) == (number == 20)
        raised.append((type(error.value), str(error.value), number))
    assert raised[0] == raised[1] and raised[0][2] == 39


PROGRAM = """
import sys, time
from pathlib import Path
from sfumato.data import decoding
from sfumato.data.sources.source import Request

decoding.ALONE, decoding.TURN, decoding.PROCESSES = 0.0, 1e-9, 2
decoding.os.getloadavg = lambda: (1.0, 1.0, 1.0)
real = decoding.Popen
def noted(*words, **ways):
    begun = real(*words, **ways)
    print(begun.pid, flush=True)
    return begun
decoding.Popen = noted
for image in decoding.decoded(sorted(Path(sys.argv[1]).glob("*/*")), Request(**{request})):
    time.sleep({pause})
print("done", flush=True)
"""


def gone(pid: int) -> bool:
    """Whether no such process is there within a few seconds."""
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux to see processes")
def test_no_process_outlives_the_one_that_began_it(tmp_path, number):
    pictures(tmp_path / "in")
    text = PROGRAM.replace("{request}", repr(REQUEST)).replace("{pause}", "0.5")
    call = [sys.executable, "-c", text, str(tmp_path / "in")]
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0) as program:
        pids = [int(program.stdout.readline()) for _ in range(2)]
        os.killpg(program.pid, number)  # as a terminal's Ctrl-C does
        said = program.communicate(timeout=60)[1]
    assert all(map(gone, pids))
    assert said.count("Traceback") == (number == signal.SIGINT), "the processes say nothing of their own"


def test_a_script_without_a_guard_is_not_run_again(tmp_path):
    """`spawn`, the way of macOS, imports the script anew in each process, which would then wait for its own lock."""
    pictures(tmp_path / "in")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PROGRAM.replace("{request}", repr(REQUEST)).replace("{pause}", "0")))
    (tmp_path / "numpy.py").write_text("raise SystemExit('a file of the folder was run')")
    (tmp_path / "else").mkdir()
    script = script.rename(tmp_path / "else/script.py")
    call = [sys.executable, str(script), str(tmp_path / "in")]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split()[2:] == ["done"]


def test_small_sets_begin_no_process(tmp_path, begun, pool):
    pool(alone=0.5)
    assert len([*decoded(pictures(tmp_path / "in"), Request(**REQUEST))]) == 90 and not begun


def test_processes_join_where_a_while_has_passed_and_as_much_is_left(tmp_path, begun, pool, monkeypatch):
    now = iter(range(10_000))
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: 0.01 * next(now))  # 0.01 s a picture
    pool(alone=0.5)
    images = decoded(pictures(tmp_path / "in"), Request(**REQUEST))
    assert len([*images]) == 90 and not begun  # after 50 of 90, only 0.4 s are left
    pool(alone=0.4)
    assert len([*decoded(pictures(tmp_path / "in"), Request(**REQUEST))]) == 90 and len(begun) == 2
    pool(alone=0.4, load=2.0)
    assert len([*decoded(pictures(tmp_path / "in"), Request(**REQUEST))]) == 90 and len(begun) == 2  # all are busy
