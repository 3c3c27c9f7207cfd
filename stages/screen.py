"""Show lines, tables and progress bars.

A terminal also shows the output of libraries. A log contains this output only until sensitive files
are opened. After that, a log contains only the output of `say`, `tell` and tables.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size
from textwrap import TextWrapper
from typing import IO, TYPE_CHECKING

import typer

from sfumato.storage.files import open_private
from stages import launch
from stages.state import state_dir

if TYPE_CHECKING:
    from rich.console import Console

# Title, columns, rows and note, as in `sfumato.release.report.Table`
LocalTable = tuple[str, Sequence[str], Iterable[Sequence[str]], str]
# Streams for `say`, `tell` and tables, once all other output is withheld
named: dict[str, IO[str]] = {}


def say(*lines: str) -> None:
    """Print lines on standard error, in the first process only."""
    for line in lines:
        if launch.speaks():
            typer.echo(wrapped(line, sys.stderr), named.get("stderr"), err=True)


def tell(*lines: str) -> None:
    """Print lines on standard output."""
    for line in lines:
        typer.echo(wrapped(line, sys.stdout), named.get("stdout"))


def wrapped(text: str, stream: IO[str]) -> str:
    """Wrap text between words for a terminal.

    Continuation lines are indented to the first word of the text. A label before two or more
    spaces, such as `local`, does not count as text.
    """
    if not stream.isatty() or "git add " in text:  # a command to copy stays on one line
        return text
    form = TextWrapper(get_terminal_size().columns, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in text.split("\n"):
        form.subsequent_indent = " " * len(re.sub(r"((?:\w+ {2,})?[\s├└─]*).*", r"\1", line))
        lines.append(form.fill(line))
    return "\n".join(lines)


def table_console() -> Console:
    """Return the console for tables. It does not interpret square brackets in names as markup."""
    from rich.console import Console

    return Console(markup=False, file=named.get("stdout"))


def hold_back() -> None:
    """From now on, redirect output to a private file, except on a terminal.

    The output of `say`, `tell` and tables is still shown.
    """
    if named:
        return
    file = state_dir() / "printed.txt"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    output = io.TextIOWrapper(open_private(file), errors="backslashreplace", line_buffering=True)
    for number, name in enumerate(("stdout", "stderr"), 1):
        named[name] = stream = getattr(sys, name)
        if stream is not None and not stream.isatty():
            stream.flush()
            if stream is getattr(sys, f"__{name}__"):
                named[name] = os.fdopen(os.dup(number), "w", 1, errors="backslashreplace")
                os.dup2(output.fileno(), number)  # C libraries write to these file descriptors
            setattr(sys, name, output)


def show_numbers(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    total: Sequence[str] = (),
    words: Container[str] = ("stage",),
    note: str | None = None,
) -> None:
    """Print a table of numbers.

    total: a separate last row; words: headings of the columns that contain text; note: text below
    the table.
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left", min_width=len(title), caption=note)
    for heading in headings:
        min_width = max(map(len, heading.split()), default=0)
        table.add_column(
            heading,
            justify="left" if heading in words else "right",
            overflow="fold",
            min_width=min_width,
        )
    for row in rows:
        table.add_row(*row)
    if total:
        table.add_section()
        table.add_row(*total)
    table_console().print(table)


def delta_text(delta: float) -> str:
    """Format a delta, rounded upwards to three significant digits."""
    from sfumato.privacy.profile import bound_text

    return bound_text(delta, 3)


def charges(number: int) -> str:
    return f"{number} charge{'s' * (number != 1)}"


@contextmanager
def progress(
    name: str, *, clock: bool = True, log: bool = True
) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal. Elsewhere, print a line every 10 %.

    clock: whether to show the remaining time. It must be false for a query, because the duration of
    a step reveals how many sensitive images were drawn;
    log: whether to print the lines if there is no terminal.
    """
    if sys.stderr.isatty() and launch.speaks():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
        if clock:
            columns.append(TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=None, visible=False)  # shown once the total is known
            yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
        return

    last_tenth = -1

    def line(done: int, total: int) -> None:
        nonlocal last_tenth
        tenth = 10 * done // max(total, 1)
        if tenth > last_tenth and log:
            last_tenth = tenth
            say(f"{name}: {done}/{total}")

    yield line


def show_local(tables: Iterable[LocalTable], file: Path, last: str = "") -> None:
    """Print tables of numbers from real images on a terminal.

    Elsewhere, as in a CI log, print only the path of the file that contains these numbers.
    """
    if sys.stdout.isatty():
        for title, columns, rows, note in tables:
            show_numbers(
                title,
                columns,
                rows,
                words=(columns[0], "recipe", "differs in", ""),
                note=note or None,
            )
        if last:
            table_console().print(last)
    else:
        tell(f"{file}: local, not to be shared, so its numbers are shown on a terminal only")
