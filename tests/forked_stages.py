"""The program `stage` by fork, for many small runs: a process that has imported the libraries runs each command.

    python tests/forked_stages.py ADDRESS

`client` writes a program `stage` that hands its words, its folder, its environment and its files over to that process,
and ends with the exit code it is given. Beside it are `dvc`, and `module`, which takes Python's words for one:
`-P -m dvc ...`.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

from faults import SIGNALS, install

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the stage gets it
    words = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(words).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(words)
    said = server.recv(16)
sys.exit(int(said or b"137"))
"""
LIBRARIES = (
    *("torch", "torchvision", "scipy.stats", "sklearn.datasets", "opacus", "dp_accounting.pld", "yaml", "pandas"),
    *("PIL.ImageFont", "jinja2", "matplotlib.font_manager", "pyarrow", "rich.table", "rich.tree"),
    *("dvc.cli.parser", "dvc.repo.reproduce", "dvc.stage.run", "dvc.repo.checkout"),
)
OURS = ("sfumato", "stages")


def client(folder: Path, address: Path) -> Path:
    """A folder with the programs `stage` and `dvc`, to be put first into PATH, and a program `module`."""
    folder.mkdir()
    for name in ("stage", "dvc", "module"):
        (folder / name).write_text(CLIENT.format(python=sys.executable, address=str(address)))
        (folder / name).chmod(0o755)
    return folder


def start(address: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the process that runs stages, with the code that PYTHONPATH names."""
    process = subprocess.Popen([sys.executable, __file__, str(address)], env=environment)
    while not address.exists():
        if process.poll() is not None:
            raise RuntimeError(f"no stages: the process ended with {process.returncode}")
        time.sleep(0.05)
    return process


def end_stages(address: Path, number: int = signal.SIGKILL) -> None:
    """Send a signal to all that runs, and wait, after a kill, until it is gone."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(str(address))
        server.sendall(number.to_bytes(4, "big"))
        server.recv(1)


def send(process: int, number: int) -> None:
    """A signal to a stage; one that ends it, to all that DVC started too."""
    try:
        (os.kill if number == SIGNALS["memory"] else os.killpg)(process, number)
    except ProcessLookupError:  # it has not yet become the first of a group
        os.kill(process, number)


def serve(address: Path) -> None:
    """Fork for each connection, and return the exit code. One without files holds a signal for all."""
    for name in LIBRARIES:
        import_module(name)
    for package in map(import_module, OURS):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            import_module(module.name)
    gc.freeze()  # no fork looks through what was imported
    program = import_module("stages.cli").main
    running: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as waiting:
        listening.bind(str(address))
        listening.listen()
        waiting.register(listening, selectors.EVENT_READ)
        while os.getppid() != 1:  # until the process that started it is gone
            for _ in waiting.select(0.01):
                connection, _ = listening.accept()
                size, files, _, _ = socket.recv_fds(connection, 4, 3)
                if not files:
                    number = int.from_bytes(size, "big")
                    for process in running:
                        send(process, number)
                    if number == signal.SIGKILL:
                        for process, asking in running.items():
                            os.waitpid(process, 0)
                            asking.close()
                        running.clear()
                        while waiting.select(0):  # those that were killed before they were heard
                            listening.accept()[0].close()
                    connection.close()
                    continue
                with connection.makefile("rb") as stream:
                    asked = json.loads(stream.read(int.from_bytes(size, "big")))
                if (process := os.fork()) == 0:
                    listening.close()
                    run_stage(*asked, files, program)
                for file in files:
                    os.close(file)
                running[process] = connection
            for process in list(running):
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    with running.pop(process) as connection:
                        connection.send(str(os.waitstatus_to_exitcode(status) % 256).encode())


def run_stage(words: list[str], folder: str, environment: dict[str, str], files: list[int], program) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, file in enumerate(files):
        os.dup2(file, number)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)  # the one of before knows another file
    code = 1
    try:
        sys.argv = words[words.index("-m") + 1 :] if words[0].endswith("/module") else words
        if Path(sys.argv[0]).name == "dvc":
            signal.signal(SIGNALS["memory"], signal.SIG_IGN)
            logging.getLogger().handlers.clear()  # of a library of ours, which DVC alone does not import
            program = import_module("dvc.cli").main
        elif "FAULT" in environment:
            install(*json.loads(environment["FAULT"]))
        code = program() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
