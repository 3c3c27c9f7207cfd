"""What a stage shows: lines on standard error, tables, progress bars."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from stages import launch

if TYPE_CHECKING:
    from sfumato.release.report import Table as LocalTable

Report = Callable[[int, int], None]  # done, of how many


def say(text: str) -> None:
    """A line on standard error, of the first process only."""
    if launch.speaks():
        typer.echo(text, err=True)


def table_console() -> Console:
    """Where tables are printed: square brackets in names are not markup."""
    return Console(markup=False)


def numbers_table(title: str, *headings: str, words: tuple[str, ...] = ("stage",)) -> Table:
    """An empty table of numbers. words: the columns that hold text."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in words else "right", overflow="fold")
    return table


def delta_text(delta: float) -> str:
    """A delta as pages and commands show it: rounded up to three digits."""
    from sfumato.privacy.profile import bound_text

    return bound_text(delta, 3)


def charges(number: int) -> str:
    return f"{number} charge{'' if number == 1 else 's'}"


@contextmanager
def progress(name: str, *, clock: bool = True) -> Iterator[Report]:
    """A progress bar on a terminal, a plain line every tenth elsewhere.

    With `clock=False` no time is shown: the time of a step on sensitive images tells how many were drawn.
    """
    if sys.stderr.isatty() and launch.speaks():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
        columns += [TimeRemainingColumn()] if clock else []
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return

    shown = -1

    def line(done: int, total: int) -> None:
        nonlocal shown
        tenth = 10 * done // max(total, 1)
        if tenth > shown:
            shown = tenth
            say(f"{name}: {done}/{total}")

    yield line


def show_local(tables: Iterable[LocalTable], file: Path, last: str = "") -> None:
    """Print tables of numbers from real images on a terminal. Elsewhere, as in a log of CI, name their file instead."""
    if sys.stdout.isatty():
        for title, columns, rows, note in tables:
            table = numbers_table(title, *columns, words=(columns[0], "recipe", "differs in", ""))
            table.caption = note or None
            for row in rows:
                table.add_row(*row)
            table_console().print(table)
        if last:
            table_console().print(last)
    else:
        typer.echo(f"{file}: local, not to be shared, so its numbers are shown on a terminal only")
