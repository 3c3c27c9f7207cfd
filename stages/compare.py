"""`stage compare`: show many runs in one table and one plot of accuracy by ε.

Local, because it uses real images.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from sfumato.errors import ConfigError, DataError, explained
from sfumato.storage.files import write_local
from sfumato.storage.in_use import use_until_the_end
from stages.screen import show_local
from stages.state import EVALUATION, check_local, state_dir


def compare(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Folders with metrics.json and ledger.json.")
    ] = None,
    dvc: Annotated[
        bool, typer.Option("--dvc", help="Add the experiments that `dvc exp show` lists here.")
    ] = False,
    classifier: Annotated[
        str | None, typer.Option(help="Classifier to plot. Default: cnn, or the first one.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Directory for comparison.csv and comparison.png.")
    ] = EVALUATION,
) -> None:
    """Local: compare runs in one table and one plot, with a warning if they are not comparable."""
    if not runs and not dvc:
        raise ConfigError(
            "nothing to compare: name folders with metrics.json and ledger.json, or give --dvc"
        )
    from sfumato.evaluation.comparison import classifiers_of, compared, read_run
    from sfumato.evaluation.plots import plot_comparison
    from sfumato.evaluation.tables import comparison_table, csv_of

    check_local("--out", out / "comparison.csv")
    use_until_the_end(state_dir())  # before numbers from real images are read
    rows = [read_run(folder) for folder in runs or ()]
    if dvc:
        rows += experiments()
    if not rows:
        raise DataError(
            "no run to compare was found: run `stage evaluate` (`dvc repro`, `dvc exp run`) and "
            "try again"
        )
    table, warnings = compared(rows)
    names = classifiers_of(table)
    if not names:
        raise DataError(
            "none of these runs has an accuracy to compare: the verdict in their metrics.json "
            "states why"
        )
    chosen = classifier or ("cnn" if "cnn" in names else names[0])
    if chosen not in names:
        raise ConfigError(
            f"--classifier {chosen} did not score any of these runs: expected one of "
            f"{', '.join(names)}"
        )
    write_local(out / "comparison.csv", csv_of(table, ".6g").encode())
    plot_comparison(table, chosen, out / "comparison.png")
    show_local([comparison_table(table, names)], out / "comparison.csv")
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(
        f"{out / 'comparison.csv'}, {out / 'comparison.png'}: local, not to be shared", err=True
    )


def experiments() -> list[dict]:
    """Return the experiments that `dvc exp show` lists, as rows, with local numbers from the state
    directory.
    """
    from sfumato.evaluation.comparison import rows_of_experiments

    listing = "dvc exp show --json"
    # -P: no module in the current folder can replace DVC
    done = subprocess.run(
        [sys.executable, "-P", "-m", *listing.split()], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[0].removeprefix(
            "ERROR: "
        )
        raise ConfigError(
            f"`{listing}` failed ({reason}): run it in the repository of the experiments"
        )
    printed = f"`{listing}` printed no JSON"
    with explained(
        ConfigError, lambda error: f"{printed} ({error}): another version of dvc may be needed"
    ):
        shown = json.loads(done.stdout)
    rows, left_out = rows_of_experiments(shown, state_dir())
    for reason in left_out:
        typer.echo(f"left out: {reason}", err=True)
    return rows
