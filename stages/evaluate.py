"""`stage evaluate`: how useful and how faithful the release is, measured on real images: local, not to be shared."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from sfumato.errors import BudgetError
from sfumato.storage.artifacts import read_artifact
from sfumato.storage.files import keep_private, write_local
from stages import launch
from stages.runner import DryRun, describe, load_plan, ready_processor, show_standing
from stages.screen import say, show_local
from stages.state import ARTIFACTS, CARD, EVALUATION, LEDGER, check_local, state_dir

MEMBERSHIP_HELP = "Also attack the release: can members of the sensitive set be told from the hold-out?"


def evaluate(
    *,
    out: Annotated[Path, typer.Option(help="Directory for the plots and the table.")] = EVALUATION,
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
    check_local("--out", out / "accuracy.csv")
    from sfumato.runtime import distributed

    if launch.asked() and not distributed.launched():
        raise SystemExit(launch.again())
    import pandas as pd

    from sfumato.data.images import load_images
    from sfumato.data.prepare import secret_key
    from sfumato.data.store import read_card
    from sfumato.evaluation import membership as attacks
    from sfumato.evaluation.comparison import identity, keep_evaluation
    from sfumato.evaluation.detector import detections
    from sfumato.evaluation.disclosure import disclosure
    from sfumato.evaluation.extractors import build_extractor
    from sfumato.evaluation.holdout import without_copies
    from sfumato.evaluation.metrics.fidelity import chosen_metrics
    from sfumato.evaluation.plots import accuracies, plot_accuracy, plot_detected, plot_neighbours
    from sfumato.evaluation.scores import PLAIN, RELEASE, evaluate_release, looked_at, teacher_accuracy
    from sfumato.evaluation.tables import accuracy_table, class_table, csv_of, tables_of
    from sfumato.evaluation.verdict import verdict
    from sfumato.features.teacher_network import load_teacher
    from sfumato.privacy.authorize import open_local
    from sfumato.privacy.ledger import read_ledger
    from sfumato.release.release import generated_images, plain_images
    from sfumato.runtime.compute import device
    from sfumato.storage.documents import read_json

    distributed.join()
    ready_processor("evaluate")
    read_artifact(synthesize, "synthesize")
    taught = teacher.exists() and read_artifact(teacher, "teacher").enabled
    synthetic = {RELEASE: load_images(synthesize, plan.classes, shape=plan.shape)}
    synthetic |= {PLAIN: plain} if (plain := plain_images(synthetic[RELEASE], synthesize)) is not None else {}
    extractor = build_extractor(plan.settings, plan.shape, log)  # before anything slow: a weights file may be missing
    train, holdout = open_local(state_dir(), read_card(CARD), "evaluate", everywhere=True)
    key = secret_key(state_dir(), plan.dataset_id)

    holdout, limits = without_copies(holdout, train)
    found = evaluate_release(synthetic, train, holdout, plan.settings, extractor, log)
    leads = distributed.is_main()
    distributed.leave()
    if not leads:
        return
    found["warnings"] = limits + found["warnings"]
    measured = bool(accuracies(found[RELEASE]))  # else the hold-out cannot judge
    found["identity"] = identity(plan, key, read_card(CARD).version, train, holdout, extractor, synthesize)
    if taught and measured:
        log("teacher")
        found["teacher"] = teacher_accuracy(load_teacher(teacher).to(device()), holdout)
    chosen = chosen_metrics(plan.settings) if measured else ()
    if extractor is not None and "disclosure" in chosen:
        log("copies of training images")
        generated = generated_images(synthetic[RELEASE], synthesize)
        found["disclosure"] = disclosure(generated, train, holdout, extractor)
    mixture = read_json(synthesize / "card.json").get("mixture")
    found["verdict"] = verdict(found | {"mixture": mixture}, holdout.labels, len(plan.classes))
    tables = {"accuracy.csv": accuracy_table(found), "per_class.csv": class_table(found)}
    attacked = []
    if membership and measured:
        log("membership inference")
        attacked = attacks.membership(synthetic[RELEASE], train, holdout)
        tables["membership.csv"] = pd.DataFrame(map(vars, attacked))
    keep_private(out)
    for earlier in ("accuracy.png", "detected.png"):
        (out / earlier).unlink(missing_ok=True)
    if "detector" in chosen:
        log("detector")
        for name, detected in detections(looked_at(synthetic), train, holdout).items():
            found[name]["fidelity"]["detector"] = detected.accuracy
            if name in (RELEASE, PLAIN):
                plot_detected(detected, out / "detected.png")
    if measured:
        plot_accuracy(found, out / "accuracy.png")
    if extractor is not None:
        log("plots")
        plot_neighbours(extractor, synthetic.get(PLAIN, synthetic[RELEASE]), train, out / "neighbours.png")
    for name, table in tables.items():
        write_local(out / name, csv_of(table).encode())
    write_local(metrics, (json.dumps(found, indent=1) + "\n").encode())
    with suppress(BudgetError):  # without a ledger; other runs replace metrics.json
        keep_evaluation(state_dir(), found | {"ledger": read_ledger(LEDGER)})
    for warning in found["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)  # not by `say`: they hold numbers of real images
    show_local(tables_of(found, attacked), metrics, f"Verdict: {found['verdict']['sentence']}")


def log(what: str) -> None:
    say(f"evaluate: {what}")
