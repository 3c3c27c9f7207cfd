"""The `stage` program: one command per stage of the pipeline."""

from __future__ import annotations

import sys

import typer

from sfumato.errors import DataError, SfumatoError
from stages import ledger, prepare, recipe
from stages.auxiliary import auxiliary
from stages.central import central
from stages.classifier import classifier
from stages.compare import compare
from stages.count import count
from stages.doctor import doctor
from stages.evaluate import evaluate
from stages.finetune import finetune
from stages.frequency import frequency
from stages.histogram import histogram
from stages.plan import plan
from stages.pretrain import pretrain
from stages.report import report
from stages.saliency import saliency
from stages.select import select
from stages.synthesize import synthesize
from stages.utility import utility

app = typer.Typer(
    name="stage",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # locals may hold sensitive pixels
    help="Sfumato: labelled synthetic images from sensitive ones, with a ledger of the privacy they cost. Each stage runs alone after `stage plan`.",
)
app.add_typer(prepare.app, name="prepare")
for command in (
    plan,
    count,
    central,
    frequency,
    auxiliary,
    classifier,
    histogram,
    select,
    pretrain,
    saliency,
    finetune,
    synthesize,
    evaluate,
    utility,
    compare,
):
    app.command()(command)
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
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(DataError.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
