"""`stage evaluate`: measure on real images how useful and faithful the release is. The results are local."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from sfumato.errors import BudgetError
from sfumato.settings.stages import ARTIFACTS, CARD_PATH, LEDGER
from sfumato.storage.files import write_local
from stages import launch
from stages.runner import DryRun, describe, load_plan, ready_processor, show_standing
from stages.screen import say, show_local
from stages.state import EVALUATION, check_local, state_dir


def evaluate(
    *,
    out: Annotated[Path, typer.Option(help="Directory for the plots.")] = EVALUATION,
    metrics: Annotated[Path, typer.Option(help="File for the numbers.")] = Path("metrics.json"),
    dry_run: DryRun = False,
) -> None:
    """Local: train classifiers on synthetic images, test them on the real hold-out, compare features."""
    plan = load_plan("evaluate")
    synthesize = ARTIFACTS / "synthesize"
    classifiers = {name: ARTIFACTS / name for name in ("teacher", "student")}
    if dry_run:
        reads = {"card": CARD_PATH, "synthesize": synthesize}
        reads |= {name: folder for name, folder in classifiers.items() if folder.exists()}
        real = {"real images": state_dir() / "data" / plan.dataset_id, "ledger": LEDGER}
        describe(plan, reads | real, metrics)
        return typer.echo(f"and the folder {out}: local, not to be shared")
    show_standing("evaluate", plan.enabled)
    if not plan.enabled:
        return metrics.unlink(missing_ok=True)
    check_local("--metrics", metrics)
    check_local("--out", out / "neighbours.png")
    from sfumato.runtime.distributed import join, launched

    if launch.asked() and not launched():
        raise SystemExit(launch.again())
    from sfumato.data.cards import read_card
    from sfumato.evaluation.comparison import keep_evaluation
    from sfumato.evaluation.evaluate import evaluate_folder
    from sfumato.evaluation.tables import tables_of
    from sfumato.privacy.ledger import read_ledger

    join()
    ready_processor()
    card = read_card(CARD_PATH)
    numbers = evaluate_folder(
        plan, synthesize, classifiers, state_dir(), card, out, progress=lambda what: say(f"evaluate: {what}")
    )
    if numbers is None:  # another process has the numbers
        return
    write_local(metrics, (json.dumps(numbers, indent=1) + "\n").encode())
    with suppress(BudgetError):  # if there is no ledger
        keep_evaluation(state_dir(), numbers | {"ledger": read_ledger(LEDGER)})
    for warning in numbers["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)  # not by `say`, because it contains numbers from real images
    show_local(tables_of(numbers), metrics, f"Verdict: {numbers['verdict']['sentence']}")
