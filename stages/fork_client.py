"""The program `stage` within a run: pass a command to `fork_server`, pass on signals, and end with
the command's exit code or signal.

    python -IS fork_client.py ADDRESS WORD...

It starts for every command, so it imports only what it needs, and nothing of the project. If no
server answers, or if the command has a different environment or other `circumstances` than the
server, it becomes the ordinary program.
"""

import json
import os
import resource
import signal
import socket
import sys

STOPS = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
OF_SHELLS = ("PWD", "OLDPWD", "SHLVL", "_")
ACCEPTED = b"y"
CODE = 4  # bytes of an exit code; it is negative if a signal ended the command


def circumstances() -> dict[str, object]:
    """Return what this process inherited, such as its environment and resource limits.

    Libraries read some of the inherited values only when they are imported. If a command inherited
    other values than the server, a fork of the server, which has already imported the libraries,
    cannot run the command. Variables that DVC or shells set for each command are left out.
    """
    umask = os.umask(0o077)
    os.umask(umask)
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    environment = os.environ.items()
    return {
        "environment": {
            k: v for k, v in environment if k not in OF_SHELLS and not k.startswith("DVC_")
        },
        "umask": umask,
        "limits": {name: list(resource.getrlimit(getattr(resource, name))) for name in limits},
        "users": [os.getuid(), os.geteuid(), os.getgid(), os.getegid(), *sorted(os.getgroups())],
        "niceness": os.nice(0),
        "processors": sorted(os.sched_getaffinity(0)),
    }


def hand_over(server: socket.socket, words: list[str]) -> bool:
    """Send the command's words, folder, environment and three standard streams to the server.

    Returns whether the server runs the command.
    """
    request = {
        "words": words,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "around": circumstances(),
    }
    content = json.dumps(request).encode()
    socket.send_fds(server, [len(content).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(content)
    return server.recv(1) == ACCEPTED


def become_ordinary(address: str, words: list[str]) -> None:
    """Replace this process with the next program `stage` in PATH."""
    own_folder = os.path.join(os.path.dirname(address), "bin")
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(folder for folder in folders if folder != own_folder)
    os.execvp("stage", ["stage", *words])


def end_as(code: int) -> None:
    """Exit with this code, or by the signal that ended the command, without a core dump."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def main() -> None:
    address = sys.argv[1]
    words = sys.argv[2:]
    heard = [
        number for number in (*PASSED_ON, *STOPS) if signal.getsignal(number) is not signal.SIG_IGN
    ]
    # Block these signals until the command runs, so that none is lost. Blocked signals are
    # delivered then
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(address)
            accepted = hand_over(server, words)
        except (OSError, ValueError):
            accepted = False
        if not accepted:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
            become_ordinary(address, words)

        def pass_on(number: int, _: object) -> None:
            if number in STOPS:
                server.send(bytes([signal.SIGSTOP]))
                os.kill(os.getpid(), signal.SIGSTOP)  # returns after a SIGCONT
                number = signal.SIGCONT
            server.send(bytes([number]))

        for number in heard:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
        try:
            code = server.recv(CODE)
        except OSError:
            code = b""
    if len(code) < CODE:
        sys.exit("error: the process that runs the stages was killed. Run the same command again")
    end_as(int.from_bytes(code, "big", signed=True))


if __name__ == "__main__":
    main()
