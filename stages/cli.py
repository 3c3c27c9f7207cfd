"""The `stage` program: one command per stage of the pipeline, and commands for projects."""

import errno
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from sfumato import __version__
from sfumato.errors import (
    FULL,
    LAST_ERROR,
    ConfigError,
    DataError,
    SfumatoError,
    explained,
    is_failure,
    lacks_memory,
    watchers,
)
from sfumato.settings.stage import LOCAL

try:
    from sfumato.settings.stages import STAGES
except ConfigError as error:  # the stage of another package cannot be loaded
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
from sfumato.storage.documents import escaped, quoted
from sfumato.storage.files import replace_private, write_json
from sfumato.storage.in_use import this_process, until_the_end
from stages import ledger, mark, prepare, recipe
from stages.brief import brief
from stages.doctor import doctor
from stages.egress import egress
from stages.evaluate import evaluate
from stages.flags import flag
from stages.forget import du, forget
from stages.init import init
from stages.launch import EXIT_CODE, die_with_parent, leave
from stages.merge import merge
from stages.plan import plan
from stages.report import report
from stages.run import run
from stages.runner import command, keep_memory_off_disk
from stages.screen import hold_back, named, say, wrapped
from stages.serve import serve
from stages.state import state_dir

MORE_FILES = ". Raise the limit on open files (`ulimit -n 4096`), and run the command again"
MORE_MEMORY = ". Free memory, or use a machine with more memory, and run the command again"
CHECK_DISK = ". Check the disk, its mount or its network connection, and run the command again"
REMEDIES = {errno.EMFILE: MORE_FILES, errno.ENFILE: MORE_FILES, errno.ENOMEM: MORE_MEMORY}

app = typer.Typer(
    name="stage",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help, because importing rich takes a quarter of a second
    pretty_exceptions_show_locals=False,  # locals may contain sensitive pixels
    help=(
        "Sfumato: labelled synthetic images from sensitive ones, with a ledger of the privacy they "
        "cost. After `stage plan`, each stage can be run on its own. Labels in brackets: a [query] "
        "command measures the sensitive images with noise and spends privacy budget; a [free] "
        "command spends none, and its results may be shared; a [local] command spends none either, "
        "but it may read real images, so its results must not be shared."
    ),
)


def show_version(value: bool) -> None:
    if value:
        typer.echo(f"sfumato {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Accept the options that precede a command."""


COMMANDS: list[Callable[..., None]] = [init, brief, plan, run]
COMMANDS += [command(stage) for stage in STAGES.values() if stage.kind is not LOCAL]
COMMANDS += [evaluate, merge, report, egress, serve, doctor, du, forget]
for function in COMMANDS:
    app.command(short_help=str(function.__doc__))(function)
for name, group in {"prepare": prepare, "ledger": ledger, "recipe": recipe, "mark": mark}.items():
    app.add_typer(group.app, name=name, short_help=group.app.info.help)


def main() -> None:
    """Run the program.

    For an error that the user can correct, print one message and exit with code 2 (configuration),
    3 (budget) or 4 (data).
    """
    open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escape what the console cannot show, such as ε, as Python already does on standard error
        sys.stdout.reconfigure(errors="backslashreplace")
    handle_signals()
    # Let waiting threads sleep instead of spin. While other programs ran, two spinning threads were
    # measured to be 4 to 8 times slower than one thread.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # PyTorch reads this when it is imported
    watchers.extend((hold_back, keep_memory_off_disk))
    try:
        check_current_folder()
        app(prog_name="stage")
    except (SystemExit, KeyboardInterrupt) as ended:
        code = getattr(ended, "code", 130)  # Typer also uses 130 after Ctrl-C
        if code == 130:
            with suppress(OSError):  # the terminal may be closed
                say(
                    "interrupted. Run the same command again: a query resumes without a second "
                    "charge, and any other stage restarts"
                )
        leave(code)
    except BrokenPipeError:  # the reader has closed the pipe, as in `stage … | head`
        discard_output()
        sys.exit(1)
    except Exception as error:
        reason = error.spelled(flag) if isinstance(error, SfumatoError) else machine_problem(error)
        public = getattr(error, "public", getattr(error, "errno", None) in FULL)
        if named and not public and not sys.stderr.isatty():
            reason = withheld(reason or traceback.format_exc())
            error = DataError()
        if reason is None:
            raise
        print(
            wrapped(f"error: {printable(reason)}", sys.stderr), file=named.get("stderr", sys.stderr)
        )
        code = getattr(error, "exit_code", DataError.exit_code)
        if LAST_ERROR in os.environ:
            write_json(
                Path(os.environ[LAST_ERROR]), {"exit_code": code, "message": printable(reason)}
            )
        discard_unwritable()
        leave(code)
    finally:
        until_the_end.close()
        watchers.clear()
        vars(sys).update(named)  # restores the streams
        named.clear()


def handle_signals() -> None:
    """Treat SIGTERM and SIGHUP like Ctrl-C, except under a launcher."""
    if EXIT_CODE in os.environ:  # under `torchrun`, processes must end at once
        die_with_parent()
    else:
        # Without a handler, the first process of a container would ignore SIGTERM, and any other
        # process would leave private files behind
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        # SIGHUP: the terminal or SSH connection was closed. `nohup` ignores it; Windows lacks it
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            signal.signal(signal.SIGHUP, signal.default_int_handler)


def check_current_folder() -> None:
    """Raise ConfigError if the current folder was deleted. Libraries would crash in it."""
    with explained(
        ConfigError,
        "the current folder does not exist any more: change to another folder (`cd`), and run the "
        "command again",
    ):
        os.getcwd()


def open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed.

    Otherwise, the next file to be opened would get the number of the closed stream.
    """
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is `number`
            setattr(sys, name, os.fdopen(descriptor, mode))


def discard_output() -> None:
    """Discard what is not printed yet, so that Python can flush the streams when it ends."""
    sys.stdout = None  # type: ignore[assignment]
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in named.values():
        os.dup2(null, stream.fileno())


def discard_unwritable() -> None:
    """Discard output that cannot be written, as on a full disk: Python would fail to flush it."""
    try:
        named.get("stdout", sys.stdout).flush()
    except OSError:
        discard_output()


def withheld(reason: str) -> str:
    """Write the reason for an error to a private file, and return a message without the reason.

    Logs may contain the message, because it reveals nothing about the images.
    """
    file = state_dir() / "refused.txt"
    with suppress(OSError):  # raised, for example, if the disk is full
        text = f"{reason}\n\n({time.ctime()}, {this_process()})\n"
        replace_private(file, text.encode(errors="backslashreplace"))
    return (
        "the command failed after it had opened sensitive images. The reason could reveal who is "
        f"in the set, so it was written to {file} only"
    )


def printable(text: str) -> str:
    """Escape control characters except line ends."""
    return "\n".join(map(escaped, text.split("\n")))


def machine_problem(error: BaseException) -> str | None:
    """Return a message if disk, memory or stack is exhausted, or if a file cannot be read.

    Returns None for any other error, which is a bug.
    """
    if isinstance(error, OSError):
        message = str(error.strerror or error)
        if error.errno in FULL:
            message += ". No partial file is left. Free some space, and run the command again"
        elif is_failure(error):
            message += REMEDIES.get(error.errno or 0, CHECK_DISK)
        if not error.filename:
            return message
        if isinstance(error, PermissionError):
            message += f". {way_to_access(Path(error.filename))}"
        return f"{error.filename}: {message}"
    if isinstance(error, RecursionError):
        return "an input file has too many nested levels to be read: correct or replace the file"
    if "home directory" in str(error):  # Path.expanduser raises a plain RuntimeError
        return "a path begins with ~ and the name of an unknown user: write the full path"
    if lacks_memory(error):
        prefix = ""
        if isinstance(error, MemoryError) and str(error):
            prefix = f"{error}: "
        return (
            f"{prefix}this machine has too little memory. Use fewer or smaller images, a smaller "
            "model or batch, or a machine with more memory, or set SFUMATO_MICROBATCH=1"
        )
    return None


def way_to_access(path: Path) -> str:
    """Return how to get access to a path or, if it does not exist, to its closest parent."""
    closest = next(p for p in (path, *path.parents) if os.path.exists(p))
    if closest.stat().st_uid == getattr(os, "geteuid", int)():  # on Windows, both are 0
        return f"Give yourself access: chmod u+rwX {quoted(closest)}"
    return (
        f"{closest} belongs to another account: ask its owner for access, or use another path. For "
        "the state directory, set SFUMATO_STATE to a folder to which you may write"
    )


if __name__ == "__main__":
    main()
