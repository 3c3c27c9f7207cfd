"""`stage evaluate`: how useful and how faithful the release is, measured on real images: local, not to be shared."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from stages import launch
from stages.runner import DryRun, describe, load_plan, ready_processor, show_standing
from stages.screen import say, show_local
from stages.state import ARTIFACTS, CARD, EVALUATION, LEDGER, check_local, state_dir

MEMBERSHIP_HELP = "Also attack the release: can members of the sensitive set be told from the hold-out?"


def evaluate(
    *,
    out: Annotated[Path, typer.Option(help="Directory for the plots.")] = EVALUATION,
    metrics: Annotated[Path, typer.Option(help="File for the numbers.")] = Path("metrics.json"),
    membership: Annotated[bool, typer.Option("--membership", help=MEMBERSHIP_HELP)] = False,
    dry_run: DryRun = False,
) -> None:
    """Local: train classifiers on synthetic images, test them on the real hold-out, compare features."""
    plan, synthesize, teacher = load_plan("evaluate"), ARTIFACTS / "synthesize", ARTIFACTS / "teacher"
    if dry_run:
        scored = {"synthesize": synthesize} | ({"teacher": teacher} if teacher.exists() else {})
        real = {"real images": state_dir() / "data" / plan.dataset_id, "ledger": LEDGER}
        describe(plan, {"card": CARD, **scored, **real}, metrics)
        return typer.echo(f"and the folder {out}: local, not to be shared")
    show_standing("evaluate", plan.enabled)
    if not plan.enabled:
        return metrics.unlink(missing_ok=True)
    check_local("--metrics", metrics)
    check_local("--out", out / "accuracy.png")
    from sfumato.runtime.distributed import join, launched

    if launch.asked() and not launched():
        raise SystemExit(launch.again())
    from sfumato.data.store import read_card
    from sfumato.evaluation.evaluate import evaluate_folder, save_evaluation
    from sfumato.evaluation.tables import tables_of

    join()
    ready_processor("evaluate")
    card, state = read_card(CARD), state_dir()
    evaluation = evaluate_folder(plan, synthesize, teacher, state, card, attack=membership, progress=log)
    if evaluation is None:  # another process has it
        return
    log("plots")
    save_evaluation(evaluation, out, metrics, state, LEDGER)
    for warning in evaluation.metrics["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)  # not by `say`: they hold numbers of real images
    sentence = evaluation.metrics["verdict"]["sentence"]
    show_local(tables_of(evaluation.metrics, evaluation.attacks), metrics, f"Verdict: {sentence}")


def log(what: str) -> None:
    say(f"evaluate: {what}")
