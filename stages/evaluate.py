"""`stage evaluate`: measure on real images how useful and faithful the release is.

The results are local: they must not be shared.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfumato.errors import BudgetError
from sfumato.settings.stage import ARTIFACTS, CARD_PATH, LEDGER, LOCAL, Stage, unknown_name
from sfumato.storage.files import json_text, write_local
from stages import launch
from stages.flags import DryRun
from stages.screen import say, show_local
from stages.state import EVALUATION, check_local, state_dir

if TYPE_CHECKING:
    from sfumato.planning.checks import Problems, Setup
    from sfumato.planning.work import Work


def evaluate(
    *,
    out: Annotated[Path, typer.Option(help="Directory for the plots.")] = EVALUATION,
    metrics: Annotated[Path, typer.Option(help="File for the numbers.")] = Path("metrics.json"),
    dry_run: DryRun = False,
) -> None:
    """[local] Train classifiers on the synthetic images, test them on the real hold-out images, and
    compare the features of real and synthetic images.
    """
    from stages.runner import load_plan, ready_processor, show_files, show_standing

    plan = load_plan("evaluate")
    synthesize = ARTIFACTS / "synthesize"
    classifiers = {name: ARTIFACTS / name for name in ("teacher", "student")}
    if dry_run:
        reads = {"card": CARD_PATH, "synthesize": synthesize}
        reads |= {name: folder for name, folder in classifiers.items() if folder.exists()}
        reads |= {"real images": state_dir() / "data" / plan.dataset_id, "ledger": LEDGER}
        show_files(plan, reads, metrics)
        return typer.echo(f"also writes the folder {out}, which is local and must not be shared")
    show_standing("evaluate", plan.enabled)
    if not plan.enabled:
        return metrics.unlink(missing_ok=True)
    check_local("--metrics", metrics)
    check_local("--out", out / "neighbours.png")
    from sfumato.runtime.distributed import join, launched

    if launch.is_configured() and not launched():
        raise SystemExit(launch.again())
    from sfumato.data.cards import read_card
    from sfumato.evaluation.evaluate import evaluate_folder
    from sfumato.evaluation.identity import keep_evaluation
    from sfumato.evaluation.tables import tables_of
    from sfumato.privacy.ledger import read_ledger

    join()
    ready_processor()
    card = read_card(CARD_PATH)
    numbers = evaluate_folder(
        plan,
        synthesize,
        classifiers,
        state_dir(),
        card,
        out,
        progress=lambda what: say(f"evaluate: {what}"),
    )
    if numbers is None:  # only the first process has the numbers
        return
    write_local(metrics, json_text(numbers).encode())
    with suppress(BudgetError):  # there may be no ledger
        keep_evaluation(state_dir(), numbers | {"ledger": read_ledger(LEDGER)})
    for warning in numbers["warnings"]:
        # Not printed by `say`: its lines may appear in logs, and warnings contain numbers from real
        # images
        print(f"warning: {warning}", file=sys.stderr)
    show_local(tables_of(numbers), metrics, f"Verdict: {numbers['verdict']['sentence']}")


def work(workload: Work) -> float:
    """Estimate the number of operations of all training runs."""
    from functools import partial

    from sfumato.evaluation.classifiers import build_classifier
    from sfumato.evaluation.downstream import schedule_of
    from sfumato.training.supervised import Schedule

    settings = workload.params.evaluate
    synthesize = workload.params.synthesize
    sets = [synthesize.count] * len(settings.seeds)
    if settings.bound:
        sets += [workload.params.privacy.size] * len(settings.seeds)
    if synthesize.relabel:
        sets.append(int(synthesize.count * (1 - synthesize.distorted - synthesize.mixed)))
    steps = sum(
        schedule_of("cnn", images, settings.epochs, settings.steps).steps for images in sets
    )
    networks = [
        partial(build_classifier, name, workload.shape, workload.classes)
        for name in settings.classifiers
    ]
    operations = sum(workload.operations(network, workload.shape) for network in networks)
    return workload.TRAINING * Schedule.batch * steps * operations


def problems(setup: Setup) -> Problems:
    from sfumato.evaluation.metrics.fidelity import METRICS

    settings = setup.params.evaluate
    if setup.params.data.holdout_fraction == 0 and setup.card.split == "keyed":
        yield (
            "data.holdout_fraction=0 leaves no hold-out images for evaluate: raise it, or remove "
            "evaluate from run"
        )
    for name in settings.fidelity or ():
        if name not in METRICS:
            yield unknown_name("evaluate.fidelity", name, METRICS)
    needs = {
        f"{key} in evaluate.fidelity": METRICS[key].needs
        for key in settings.fidelity or ()
        if key in METRICS
    }
    if settings.weights:
        needs["evaluate.weights"] = "inception"
    for option, extractor in needs.items():
        if extractor not in ("", settings.extractor):
            yield (
                f"{option} requires evaluate.extractor={extractor}, but evaluate.extractor is "
                f"{settings.extractor}: set it to {extractor}, or remove {option}"
            )


STAGE = Stage(
    "evaluate",
    LOCAL,
    "Train classifiers on the synthetic images, test them on the real hold-out images, and compare "
    "the features of real and synthetic images.",
    "sfumato.settings.evaluate:Evaluate",
    evaluate,
    inputs=("synthesize", "student", "teacher"),
    optional=("student", "teacher"),
    beside=(LEDGER,),
    several_labels=True,
    work=work,
    problems=problems,
)
