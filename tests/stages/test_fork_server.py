"""Commands in forks of one process behave like separate processes, and do not outlive their server.

Most tests start a server without libraries. Its commands are the functions of `COMMANDS` below.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import json, os, resource, signal, sys, time
from pathlib import Path
from stages import cli, fork_server

def show():
    streams = [sys.stdin.readline(), sys.stdout.isatty(), sys.stdout is sys.__stdout__]
    print(json.dumps({
        "argv": sys.argv, "folder": os.getcwd(), "streams": streams,
        "given": os.environ.get("DVC_STAGE"), "session": os.getsid(0) == os.getpid(),
        "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
    }))

def wait():
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(os.getpid(), flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        time.sleep(0.3)
        sys.exit(130)

def draw():
    import numpy, random, torch
    from sfumato.privacy.noise import NoiseSource
    drawn = [random.random(), numpy.random.rand(), float(NoiseSource().gaussian((1,), 1.0))]
    print(json.dumps([*drawn, float(torch.ones(512, 512).mm(torch.ones(512, 512)).sum())]))

def leave():
    import atexit, threading
    atexit.register(print, "exit function")
    threading.Timer(0.2, print, ["thread"]).start()
    sys.exit("message")

COMMANDS = {
    "show": show, "wait": wait, "draw": draw, "leave": leave,
    "deaf": lambda: (print(os.getpid(), flush=True), time.sleep(60)),
    "exit": lambda: sys.exit(3), "bug": lambda: 1 / 0, "abort": os.abort,
}
cli.main = lambda: COMMANDS[sys.argv[1]]()
fork_server.import_libraries = lambda request: None
if os.environ.get("LIBRARIES"):
    import numpy, torch, sfumato.privacy.noise
fork_server.main()
"""


class Served:
    """A server in a folder, and the environment whose `stage` uses it.

    The ordinary program `stage` only prints that it is the ordinary one.
    """

    def __init__(self, folder: Path, **more: str) -> None:
        self.folder = folder / "private"
        self.folder.mkdir(mode=0o700)
        ordinary = folder / "ordinary" / "stage"
        ordinary.parent.mkdir()
        ordinary.write_text('#!/bin/sh\necho "ordinary $*"\n')
        ordinary.chmod(0o755)
        path = os.pathsep.join([str(self.folder / "bin"), str(ordinary.parent), os.environ["PATH"]])
        self.environment = {
            **os.environ,
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "2",
            **more,
        }
        words = [sys.executable, "-c", SERVER, str(self.folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(
            words, env=self.environment, start_new_session=True, **pipes
        )
        assert self.process.stdout.readline() == b"ready\n"

    def start(self, *words: str, **more) -> subprocess.Popen:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        given = {"env": self.environment, "text": True} | pipes | more
        return subprocess.Popen(["stage", *words], **given)

    def run(self, *words: str, **more) -> tuple[int, str]:
        client = self.start(*words, **more)
        told = client.communicate("typed\n", timeout=60)[0]
        return client.returncode, told

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(20)


@pytest.fixture
def served(tmp_path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


def gone(process: int, within: float = 10.0) -> bool:
    """Return whether a process ends soon."""
    deadline = time.monotonic() + within
    while psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_fork_has_the_words_streams_and_folder_of_its_client(served, tmp_path):
    code, told = served.run(
        "show", "--size", "8 8", cwd=tmp_path, env=served.environment | {"DVC_STAGE": "count"}
    )
    found = json.loads(told)
    assert code == 0 and found["argv"] == ["stage", "show", "--size", "8 8"]
    assert found["folder"] == str(tmp_path) and found["given"] == "count"
    assert found["streams"] == ["typed\n", False, True]
    assert found["session"] and found["descriptors"][:3] == [0, 1, 2]
    assert len(found["descriptors"]) == 4, "of the server, no pipe or socket; one lists the folder"


def test_a_fork_ends_with_its_own_exit_code_or_signal(served):
    assert served.run("exit") == (3, "")
    code, told = served.run("bug")
    assert code == 1 and "ZeroDivisionError" in told
    assert served.run("leave") == (1, "message\nthread\nexit function\n"), (
        "in the order of an ordinary program"
    )
    assert served.run("abort")[0] == -signal.SIGABRT
    assert served.run("exit") == (3, ""), "the server still runs"


@pytest.mark.parametrize("differs", ["variable", "umask", "limit", "niceness"])
def test_other_circumstances_start_the_ordinary_program(served, differs):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

    change = {
        "variable": {"env": served.environment | {"OMP_NUM_THREADS": "1"}},
        "umask": {"umask": 0o027},
        "limit": {"preexec_fn": limit},
        "niceness": {"preexec_fn": lambda: os.nice(3)},
    }[differs]
    assert served.run("exit", "now", **change) == (0, "ordinary exit now\n")
    assert served.run("exit", "now") == (3, "")


def test_without_a_server_stage_is_the_ordinary_program(served):
    served.close()
    assert served.run("show", "--help") == (0, "ordinary show --help\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_client_reaches_the_command_once(served, number):
    client = served.start("wait")
    assert client.stdout.readline()
    client.send_signal(number)
    told = client.communicate(timeout=20)[0]
    assert (client.returncode, told) == (130, "interrupted\n")


def test_a_command_stops_and_continues_with_its_client(served):
    client = served.start("wait")
    process = psutil.Process(int(client.stdout.readline()))
    for number, status in (
        (signal.SIGTSTP, psutil.STATUS_STOPPED),
        (signal.SIGCONT, psutil.STATUS_SLEEPING),
    ):
        client.send_signal(number)
        deadline = time.monotonic() + 10
        while process.status() != status:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    client.send_signal(signal.SIGTERM)
    assert client.wait(20) == 130


def test_a_killed_client_takes_its_command_with_it(served):
    client = served.start("deaf")
    process = int(client.stdout.readline())
    client.kill()
    assert gone(process)
    assert served.run("exit") == (3, "")


def test_a_killed_command_ends_its_client_by_the_same_signal(served):
    client = served.start("deaf")
    os.kill(int(client.stdout.readline()), signal.SIGKILL)
    assert client.wait(20) == -signal.SIGKILL


def test_a_killed_server_takes_all_commands_with_it(served):
    client = served.start("deaf")
    process = int(client.stdout.readline())
    served.process.kill()
    told = client.communicate(timeout=20)[0]
    assert client.returncode == 1 and "Run the same command again" in told
    assert gone(process)


def test_a_server_ends_with_its_starter(served):
    client = served.start("deaf")
    process = int(client.stdout.readline())
    served.process.stdin.close()
    assert served.process.wait(20) == 0 and gone(process)
    assert client.wait(20) == -signal.SIGKILL


def test_a_long_path_of_a_socket_is_no_error(tmp_path):
    """If the path has more than 107 bytes, the stages start as ordinary programs."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir(mode=0o700)
    run = [sys.executable, "-P", "-m", "stages.fork_server", str(folder)]
    done = subprocess.run(
        run, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_folder_that_others_may_enter_is_refused(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    run = [sys.executable, "-P", "-m", "stages.fork_server", str(folder)]
    done = subprocess.run(
        run, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 1 and "have mode 700" in done.stderr and not any(folder.iterdir())


def test_two_forks_draw_differently_and_compute(tmp_path):
    served = Served(tmp_path, LIBRARIES="1")
    drawn = [json.loads(served.run("draw")[1]) for _ in range(2)]
    served.close()
    assert drawn[0][3] == drawn[1][3] == 512.0**3
    assert not {*drawn[0][:3]} & {*drawn[1][:3]}


IMPORTS = """
import sys
from pathlib import Path
import torch
touched = []
for name in ("_lazy_init", "is_available", "device_count"):
    setattr(torch.cuda, name, lambda *_, name=name: touched.append(name) or 0)

def threads():
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return len(names) - names.count("jemalloc_bg_thd")  # which a fork does without

import scipy.linalg  # OpenBLAS ends its threads before a fork, and starts them again
before = threads()
from stages.fork_server import ForkRequest, import_libraries
for word in ("plan", "finetune"):
    import_libraries(ForkRequest(words=[word], folder=".", environment={}, around={}))
needed = {"torch._dynamo", "dp_accounting.pld", "stages.finetune", "sfumato.dpsgd.run"}
print(touched, threads() - before, needed - {*sys.modules})
"""


def test_imports_before_a_fork_start_no_thread_or_gpu():
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[] 0 set()\n", done.stderr
