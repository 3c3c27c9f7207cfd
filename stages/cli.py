"""The `stage` program: one command per stage of the pipeline, and those around it."""

from __future__ import annotations

import sys

import typer

from sfumato.errors import DataError, SfumatoError
from sfumato.pipeline import STAGES
from stages import ledger, prepare, recipe
from stages.compare import compare
from stages.doctor import doctor
from stages.evaluate import evaluate
from stages.plan import plan
from stages.report import report
from stages.runner import command
from stages.utility import utility

OWN = {"evaluate": evaluate}  # stages whose command has options of its own

app = typer.Typer(
    name="stage",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # locals may hold sensitive pixels
    help="Sfumato: labelled synthetic images from sensitive ones, with a ledger of the privacy they cost. "
    "Each stage runs alone after `stage plan`.",
)
app.add_typer(prepare.app, name="prepare")
for function in (plan, *(OWN.get(name) or command(stage) for name, stage in STAGES.items()), utility, compare):
    app.command()(function)
app.add_typer(ledger.app, name="ledger")
app.command()(report)
app.add_typer(recipe.app, name="recipe")
app.command()(doctor)


def main() -> None:
    """Run the program. A user's mistake is one sentence and its exit code: 2 configuration, 3 budget, 4 data."""
    try:
        app()
    except SfumatoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(DataError.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
