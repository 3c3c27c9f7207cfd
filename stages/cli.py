"""The `stage` program: one command per stage of the pipeline, and those around it."""

import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import typer

from sfumato.errors import FULL, LAST_ERROR, DataError, SfumatoError, is_failure, lacks_memory, watchers
from sfumato.settings.stages import STAGES, Kind
from sfumato.storage.documents import HIDDEN
from sfumato.storage.files import replace_private, write_json
from sfumato.storage.in_use import until_the_end
from stages import ledger, prepare, recipe, release
from stages.brief import brief
from stages.compare import compare
from stages.doctor import doctor
from stages.egress import egress
from stages.evaluate import evaluate
from stages.forget import du, forget
from stages.init import init
from stages.launch import EXIT_CODE, leave
from stages.merge import merge
from stages.plan import plan
from stages.report import report
from stages.runner import command, keep_memory_off_disk
from stages.screen import hold_back, named, say, wrapped
from stages.serve import serve
from stages.state import state_dir

MORE_FILES = ". Raise the limit of open files (`ulimit -n 4096`), and run the same again"
MORE_MEMORY = ". Free memory, or take a machine with more, and run the same again"
CHECK_DISK = ". Check the disk, its mount, or the network behind it, and run the same again"
REMEDIES = {errno.EMFILE: MORE_FILES, errno.ENFILE: MORE_FILES, errno.ENOMEM: MORE_MEMORY}

app = typer.Typer(
    name="stage",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # locals may hold sensitive pixels
    help="Sfumato: labelled synthetic images from sensitive ones, with a ledger of the privacy they cost. "
    "Each stage runs alone after `stage plan`.",
)
COMMANDS: list[Callable[..., None]] = [init, brief, plan]
COMMANDS += [command(stage) for stage in STAGES.values() if stage.kind is not Kind.LOCAL]
COMMANDS += [evaluate, compare, merge, report, egress, serve, doctor, du, forget]
for function in COMMANDS:
    app.command()(function)
for name, group in {"prepare": prepare, "ledger": ledger, "recipe": recipe, "release": release}.items():
    app.add_typer(group.app, name=name)


def main() -> None:
    """Run the program. A user's mistake is one sentence and its exit code: 2 configuration, 3 budget, 4 data."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a console without ε; standard error is like that
    if EXIT_CODE not in os.environ:  # `torchrun` waits for its processes to end at once
        # as Ctrl-C: a container's first process would ignore it, and any other would leave private files behind
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    watchers.extend((hold_back, keep_memory_off_disk))
    try:
        app(prog_name="stage")
    except (SystemExit, KeyboardInterrupt) as ended:
        code = getattr(ended, "code", 130)  # Typer's after Ctrl-C, too
        if code == 130:
            say("stopped. Run the same again: a query goes on and is not charged twice, anything else starts again")
        leave(code)
    except BrokenPipeError:  # `stage … | head`: whoever read has seen enough
        sys.stdout = None  # type: ignore[assignment]  # nothing is left to flush at the end
        sys.exit(1)
    except Exception as error:
        reason = str(error) if isinstance(error, SfumatoError) else beyond_the_machine(error)
        public = getattr(error, "public", getattr(error, "errno", None) in FULL)
        if named and not public and not sys.stderr.isatty():
            reason = withheld(reason or traceback.format_exc())
            error = DataError()
        if reason is None:
            raise
        print(wrapped(f"error: {shown(reason)}", sys.stderr), file=named.get("stderr", sys.stderr))
        code = getattr(error, "exit_code", DataError.exit_code)
        if LAST_ERROR in os.environ:
            write_json(Path(os.environ[LAST_ERROR]), {"exit_code": code, "message": shown(reason)})
        leave(code)
    finally:
        until_the_end.close()
        watchers.clear()
        vars(sys).update(named)  # the streams
        named.clear()


def withheld(reason: str) -> str:
    """What a log shows of an error after sensitive files were opened: always the same. The reason goes to a file."""
    file = state_dir() / "refused.txt"
    with suppress(OSError):  # no room for it, say
        replace_private(file, f"{reason}\n".encode(errors="backslashreplace"))
    return f"stopped after sensitive images were opened: the reason, which may tell who is in the set, is in {file}"


def shown(text: str) -> str:
    """A message whose control characters, from names of files, are escaped: a terminal would obey them."""
    return "\n".join(HIDDEN.sub(lambda found: repr(found[0])[1:-1], line) for line in text.split("\n"))


def beyond_the_machine(error: BaseException) -> str | None:
    """The message if the disk, the memory or the stack did not suffice, or a file cannot be read; None for a bug."""
    if isinstance(error, OSError):
        message = str(error.strerror or error)
        if error.errno in FULL:
            message += ". Nothing half-written is left; make room and run again"
        elif is_failure(error):
            message += REMEDIES.get(error.errno or 0, CHECK_DISK)
        if not error.filename:
            return message
        if isinstance(error, PermissionError):
            place = next(filter(os.path.exists, (error.filename, *Path(error.filename).parents)))
            message += f". Give yourself access: chmod u+rwX {place}"
        return f"{error.filename}: {message}"
    if isinstance(error, RecursionError):
        return "an input is nested too deeply to be read"
    if "home directory" in str(error):  # Path.expanduser, which has no type of its own either
        return "a path begins with ~ and the name of a user who is not here: write the whole path"
    if lacks_memory(error):
        about = ""
        if isinstance(error, MemoryError) and str(error):
            about = f"{error}: "
        return (
            f"{about}the memory of this machine does not suffice. Take fewer or smaller images, a smaller model or "
            "batch, or SFUMATO_MICROBATCH=1; or a machine with more"
        )
    return None


if __name__ == "__main__":
    main()
