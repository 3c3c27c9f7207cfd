"""A process that has imported the libraries, and forks a child for each command of `stage` in a
run.

    python -P -m stages.fork_server FOLDER

Starting Python with its libraries takes seconds of processor time, but a fork takes a hundredth of
a second. FOLDER is private to the user. The server creates two entries in it: a socket, and a
folder `bin`, which the caller puts first in PATH. The server reads no images. Each command runs in
a separate child with its own streams, folder, environment, signals and exit code, as if a process
had been started for it. The server's standard input is a pipe from the process that started it.
When that process ends, the pipe is closed, and the server ends too.

Guarantee: only the user can hand over a command, because of FOLDER's mode. A child does not inherit
the randomness of the noise: each process draws a new key.
"""

import atexit
import gc
import json
import math
import os
import selectors
import shlex
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import NoReturn

from sfumato.settings.stages import STAGES
from stages import fork_client
from stages.fork_client import ACCEPTED, CODE, circumstances
from stages.launch import die_with_parent

SOCKET = "socket"
# Packages that stages import within their functions
IMPORTED_LATE = (
    "data",
    "features",
    "dpsgd",
    "diffusion",
    "generators",
    "training",
    "queries",
    "release",
)
# Seconds that commands may still run after the process that started the server has ended
TIME_TO_END = 3.0


@dataclass(frozen=True, kw_only=True)
class ForkRequest:
    """A command that a client hands over. around: `circumstances` of the client."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    around: dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Running:
    """A child that runs a command.

    process: process ID of the child; ended: descriptor that can be read once the child has ended;
    client: connection to the program that handed over the command.
    """

    process: int
    ended: int
    client: socket.socket

    def send(self, number: int) -> None:
        """Send a signal to the child and to all processes that it started."""
        try:
            os.killpg(self.process, number)
        except ProcessLookupError:  # the child does not lead a process group yet
            with suppress(ProcessLookupError):
                os.kill(self.process, number)

    def finish(self) -> None:
        """Send the exit code of the ended child to its client."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        with suppress(OSError):  # the client is gone
            self.client.send(code.to_bytes(CODE, "big", signed=True))
        self.client.close()
        os.close(self.ended)


class ForkServer:
    """A server that waits for commands, and forks a child for each.

    prepare: function that imports what a command needs; accepts: function that returns whether a
    command may run in a fork.
    """

    def __init__(
        self,
        folder: Path,
        prepare: Callable[[ForkRequest], None],
        accepts: Callable[[ForkRequest], bool],
    ) -> None:
        self.prepare = prepare
        self.accepts = accepts
        self.running: set[Running] = set()
        self.selector = selectors.DefaultSelector()
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(folder / SOCKET))
        self.listening.listen()
        self.selector.register(self.listening, selectors.EVENT_READ)

    def serve(self, starter: int) -> ForkRequest | None:
        """Fork for each command, until the pipe `starter` is closed and all commands have ended.

        In each child, this returns the child's command. In the server, it returns None at the end.
        """
        self.selector.register(starter, selectors.EVENT_READ)
        deadline = math.inf
        longest = None  # wait of the selector, in seconds
        while self.running or deadline == math.inf:
            for key, _ in self.selector.select(longest):
                if key.data:
                    self.attend(key.data, key.fd)
                elif key.fd == starter:
                    longest = TIME_TO_END
                    deadline = time.monotonic() + longest
                    self.selector.unregister(starter)
                elif request := self.receive():
                    return request
            if time.monotonic() > deadline:
                for child in self.running:
                    child.send(signal.SIGKILL)
        return None

    def receive(self) -> ForkRequest | None:
        """Accept a command and fork. Returns the command in the child, and None in the server."""
        client, _ = self.listening.accept()
        request = None
        streams: list[int] = []
        # These errors are raised if the client was killed
        with suppress(OSError, ValueError), client.makefile("rb") as stream:
            size, streams, _, _ = socket.recv_fds(client, 4, 3)
            request = ForkRequest(**json.loads(stream.read(int.from_bytes(size, "big"))))
        if request is None or not self.accepts(request):
            client.close()
        else:
            self.prepare(request)
            server = os.getpid()
            process = os.fork()
            if process == 0:
                self.close()
                become(request, streams, server)
                client.send(ACCEPTED)
                client.close()
                return request
            running = Running(process=process, ended=os.pidfd_open(process), client=client)
            self.running.add(running)
            self.selector.register(running.ended, selectors.EVENT_READ, running)
            self.selector.register(client, selectors.EVENT_READ, running)
        for descriptor in streams:
            os.close(descriptor)
        return None

    def attend(self, child: Running, descriptor: int) -> None:
        """Handle the end of a child, a signal that a client passes on, or the death of a client."""
        if child not in self.running:
            return  # the child's end was in the same batch of events, and has been handled
        if descriptor == child.ended:
            self.running.remove(child)
            self.selector.unregister(child.ended)
            with suppress(KeyError):
                self.selector.unregister(child.client)
            child.finish()
            return
        passed = b""
        with suppress(ConnectionError):
            passed = child.client.recv(1)
        if passed:
            child.send(passed[0])
        else:
            self.selector.unregister(child.client)
            child.send(signal.SIGKILL)

    def close(self) -> None:
        """Close, in a child, the files that only the server uses."""
        self.listening.close()
        for child in self.running:
            child.client.close()
            os.close(child.ended)
        self.selector.close()


def become(request: ForkRequest, streams: list[int], server: int) -> None:
    """Give a forked child its command's environment, folder, streams and arguments.

    streams: descriptors of the three standard streams; server: process ID of the server. If the
    server ends, the child is killed.
    """
    os.setsid()
    die_with_parent()
    if os.getppid() != server:
        os._exit(1)  # the server ended before `die_with_parent`, so no signal will come
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        os.dup2(streams[number], number)
        os.close(streams[number])
        old = getattr(sys, name)
        stream = open(number, mode, 1, old.encoding, old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["stage", *request.words]
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python reseeds its own generator after a fork


def run_and_end(command: Callable[[], object]) -> NoReturn:
    """In a forked child, run a command, then exit as Python would, but without freeing what was
    imported.

    Freeing would copy the memory shared with the server, page by page, which takes two seconds of
    processor time per command.
    """
    code: object = 1
    try:
        code = command()
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        sys.excepthook(*sys.exc_info())
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # Errors mean that the stream does not exist, or that its reader has closed the pipe
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit((code or 0) & 0xFF)


def import_libraries(request: ForkRequest) -> None:
    """Import the libraries that this command and later commands need.

    Imports must not compute anything: threads and GPUs do not survive a fork.
    """
    import stages.cli  # noqa: F401

    name = "".join(request.words[:1])
    if name in STAGES or name == "plan":
        import dp_accounting.pld  # noqa: F401

        import sfumato.planning.folder  # noqa: F401
    if name in STAGES:
        import torch._dynamo  # noqa: F401  # optimizers import it

        for package in IMPORTED_LATE:
            for module in iter_modules(import_module(f"sfumato.{package}").__path__):
                import_module(f"sfumato.{package}.{module.name}")
    gc.freeze()  # the garbage collector of a fork skips imported objects


def write_program(folder: Path) -> None:
    """Write the program `stage`, which hands each command over to the server."""
    program = folder / "bin" / "stage"
    program.parent.mkdir()
    words = [sys.executable, "-IS", fork_client.__file__, str(folder / SOCKET)]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o700)


def main() -> None:
    folder = Path(sys.argv[1])
    status = folder.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
        sys.exit(
            f"error: {folder} must belong to you and have mode 700. Otherwise, other accounts "
            "could run commands as you"
        )
    around = json.loads(json.dumps(circumstances()))
    try:
        os.close(os.pidfd_open(os.getpid()))
        server = ForkServer(folder, import_libraries, lambda request: request.around == around)
    except OSError:
        # The kernel is older than Linux 5.3, or the path of the socket is too long. Commands start
        # as ordinary programs
        return
    # Let waiting threads sleep, as in `stages.cli`. PyTorch reads this when it is imported
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    atexit.register(gc.unfreeze)  # otherwise, a library reports objects left at the end
    write_program(folder)
    print("ready", flush=True)
    if server.serve(sys.stdin.fileno()):
        from stages.cli import main as stage

        run_and_end(stage)


if __name__ == "__main__":
    main()
