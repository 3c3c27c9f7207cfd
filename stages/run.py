"""`stage run`: run all stale stages, in forks of one process that has imported the libraries."""

import importlib.util
import sys
from typing import Annotated

import typer

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        help="Stages of dvc.yaml to run. Default: all. Words after `--` are passed to `dvc repro`."
    ),
]


def run(
    targets: Targets = None,
    without: Annotated[
        bool, typer.Option("--no-dvc", help="Run the stages in order, without DVC.")
    ] = False,
) -> None:
    """Run the stages whose settings or inputs have changed since the last run. This command does
    what `dvc repro` does, but imports the libraries only once.
    """
    from sfumato.planning.project import Project, repro

    folder = Project().folder
    if without or importlib.util.find_spec("dvc") is None:
        from stages.without_dvc import run_in_order

        return run_in_order(folder, targets or [])
    terminal = sys.stdout.isatty() and sys.stderr.isatty()
    repro(folder, *targets or [], shown=True, terminal=terminal)
