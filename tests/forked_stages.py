"""Run the programs `stage` and `dvc` by fork, for many small runs, through the product's fork
server.

    python tests/forked_stages.py FOLDER

`client` writes the programs: `stage`, `dvc`, and `module`, which takes arguments as Python does,
such as `-P -m dvc ...`. The server accepts every command. A command of `stage` runs with the fault
that the variable FAULT requests.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import logging
import os
import pkgutil
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from importlib import import_module
from pathlib import Path

import psutil
import typer.main
from faults import SIGNALS, install

from stages import cli, fork_client
from stages.fork_server import ForkRequest, ForkServer, run_and_end

LIBRARIES = (
    *(
        "torch",
        "torchvision",
        "scipy.stats",
        "sklearn.datasets",
        "opacus",
        "dp_accounting.pld",
        "yaml",
        "pandas",
    ),
    *("PIL.ImageFont", "jinja2", "matplotlib.font_manager", "pyarrow", "rich.table", "rich.tree"),
    *("dvc.cli.parser", "dvc.repo.reproduce", "dvc.stage.run", "dvc.repo.checkout"),
    # Modules that DVC imports late. pygit2 is left out, because with it, forks would use the home
    # folder of this process
    *("dvc.scm", "dvc.cachemgr", "dvc.data_cloud", "dvc.lock", "dvc.rwlock", "dvc.ignore"),
    *("dvc.dirs", "configobj", "dvc_render", "networkx", "ruamel.yaml", "dulwich.worktree"),
)
OURS = ("sfumato", "stages")
PROGRAMS = ("stage", "dvc", "module")


def client(folder: Path, address: Path) -> Path:
    """Write the programs to a new folder, which must come first in PATH. Returns the folder.

    The server gets a program's name as the first word.
    """
    folder.mkdir()
    for name in PROGRAMS:
        words = [sys.executable, "-IS", fork_client.__file__, str(address), name]
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def start(address: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the process that runs stages, with the code that PYTHONPATH names.

    It ends when this process ends.
    """
    words = [sys.executable, __file__, str(address.parent)]
    process = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE)
    while not address.exists():
        if process.poll() is not None:
            raise RuntimeError(f"no stages: the process ended with {process.returncode}")
        time.sleep(0.05)
    return process


def end_stages(address: Path, number: int = signal.SIGKILL) -> None:
    """Send a signal to all running programs. After SIGKILL, wait until they have ended."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(str(address))
        process, _, _ = struct.unpack(
            "3i", server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
    running = psutil.Process(process).children()
    for one in running:
        send(one.pid, number)
    if number == signal.SIGKILL:
        psutil.wait_procs(running)


def send(process: int, number: int) -> None:
    """Send a signal to a program.

    A signal that ends the program also goes to the processes that it started.
    """
    try:
        (os.kill if number == SIGNALS["memory"] else os.killpg)(process, number)
    except ProcessLookupError:  # the process does not lead a group yet, or it has ended
        if psutil.pid_exists(process):
            os.kill(process, number)


def import_all() -> None:
    for name in LIBRARIES:
        import_module(name)
    for package in map(import_module, OURS):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            import_module(module.name)
    # Build the command line once, not in each fork
    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(cli.app)
    # When a fork ends, finalizers would copy the memory that the fork shares with the server
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False
    times = getattr(sys.modules.get("torch._dynamo.utils"), "dump_compile_times", None)
    atexit.unregister(times)  # this would import `tabulate`, to report compile times
    gc.freeze()  # garbage collection in forks skips what was imported


def run(request: ForkRequest) -> None:
    """Run a program in the child."""
    name, *words = request.words
    if (name, *words[:1]) == ("stage", "run"):
        # With the program `module` in place of Python, the processes that this command starts are
        # forked too, and need not import anything again
        sys.executable = shutil.which("module") or sys.executable
    if name == "module":
        name, *words = words[words.index("-m") + 1 :]
    sys.argv = [name, *words]
    program = "stages.cli" if name == "stage" else name
    if name == "dvc":
        signal.signal(SIGNALS["memory"], signal.SIG_IGN)
        # These handlers are from our package, which DVC itself does not import
        logging.getLogger().handlers.clear()
        program = "dvc.cli"
    elif "FAULT" in os.environ:
        install(*json.loads(os.environ["FAULT"]))
    run_and_end(import_module(program).main)


if __name__ == "__main__":
    import_all()
    atexit.register(gc.unfreeze)
    asked = ForkServer(Path(sys.argv[1]), lambda _: None, lambda _: True).serve(sys.stdin.fileno())
    if asked:
        run(asked)
