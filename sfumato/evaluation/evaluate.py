"""A release in a folder, judged by the real images behind it: its numbers and the files for its owner, all local."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sfumato.data.images import ImageSet, load_images
from sfumato.data.prepare import secret_key
from sfumato.data.store import Card
from sfumato.errors import BudgetError
from sfumato.evaluation.comparison import identity, keep_evaluation
from sfumato.evaluation.detector import Detected, detections
from sfumato.evaluation.disclosure import disclosure
from sfumato.evaluation.extractors import Extractor, build_extractor
from sfumato.evaluation.holdout import without_copies
from sfumato.evaluation.membership import Attack, membership
from sfumato.evaluation.metrics.fidelity import chosen_metrics
from sfumato.evaluation.plots import accuracies, plot_accuracy, plot_detected, plot_neighbours
from sfumato.evaluation.scores import PLAIN, RELEASE, evaluate_release, looked_at, teacher_accuracy
from sfumato.evaluation.tables import csv_of
from sfumato.evaluation.verdict import verdict
from sfumato.features.teacher_network import load_teacher
from sfumato.privacy.authorize import open_local
from sfumato.privacy.ledger import read_ledger
from sfumato.privacy.resolved import StagePlan
from sfumato.release.release import generated_images, plain_images
from sfumato.runtime import distributed
from sfumato.runtime.compute import device
from sfumato.settings.evaluate import Evaluate
from sfumato.storage.artifacts import read_artifact
from sfumato.storage.files import keep_private, write_local


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured, and what its pictures show.

    metrics: the content of metrics.json; attacks: of membership, none unless asked for; looked: the set whose likeness
    was measured; detected: what tells it from real images, None if that was not asked for.
    """

    metrics: dict[str, Any]
    attacks: list[Attack]
    looked: ImageSet
    train: ImageSet
    extractor: Extractor | None
    detected: Detected | None

    @property
    def measured(self) -> bool:
        """Whether the hold-out could judge."""
        return bool(accuracies(self.metrics[RELEASE]))


def evaluate_folder(
    plan: StagePlan[Evaluate],
    release: Path,
    teacher: Path,
    state: Path,
    card: Card,
    *,
    attack: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Evaluation | None:
    """Measure the release in a folder on the real images of `card`, which this opens, as the journal then says.

    A collective call, which ends the group of processes; None in all but the first.
    teacher: its folder, which need not be there; state: the state directory; attack: also try to tell members of the
    sensitive set from the hold-out; progress: told of each step. Raises DataError for what is missing or does not fit.
    """
    read_artifact(release, "synthesize")
    taught = teacher.exists() and read_artifact(teacher, "teacher").enabled
    released = load_images(release, plan.classes, shape=plan.shape)
    plain = plain_images(released, release)
    synthetic = {RELEASE: released} if plain is None else {RELEASE: released, PLAIN: plain}
    extractor = build_extractor(plan.settings, plan.shape, progress)  # before anything slow: a file may be missing
    train, holdout = open_local(state, card, "evaluate", everywhere=True)
    holdout, limits = without_copies(holdout, train)
    metrics = evaluate_release(synthetic, train, holdout, plan.settings, extractor, progress)
    leads = distributed.is_main()
    distributed.leave()
    if not leads:
        return None
    metrics["warnings"] = limits + metrics["warnings"]
    key = secret_key(state, plan.dataset_id)
    metrics["identity"] = identity(plan, key, card.version, train, holdout, extractor, release)
    measured = bool(accuracies(metrics[RELEASE]))
    chosen = chosen_metrics(plan.settings) if measured else ()
    if taught and measured:
        progress("teacher")
        metrics["teacher"] = teacher_accuracy(load_teacher(teacher).to(device()), holdout)
    if extractor is not None and "disclosure" in chosen:
        progress("copies of training images")
        metrics["disclosure"] = disclosure(generated_images(released, release), train, holdout, extractor)
    metrics["verdict"] = verdict(metrics, holdout.labels, len(plan.classes))
    attacks = []
    if attack and measured:
        progress("membership inference")
        attacks = membership(released, train, holdout)
    detected = None
    if "detector" in chosen:
        progress("detector")
        detected = detect_all(metrics, synthetic, train, holdout)
    looked = synthetic.get(PLAIN, released)
    return Evaluation(
        metrics=metrics, attacks=attacks, looked=looked, train=train, extractor=extractor, detected=detected
    )


def detect_all(
    metrics: dict[str, Any], synthetic: Mapping[str, ImageSet], train: ImageSet, holdout: ImageSet
) -> Detected | None:
    """Add a detector's accuracy to the fidelity of each set in `metrics`. Returns that of the release."""
    detected_by_set = detections(looked_at(synthetic), train, holdout)
    for name, detected in detected_by_set.items():
        metrics[name]["fidelity"]["detector"] = detected.accuracy
    return detected_by_set.get(PLAIN, detected_by_set.get(RELEASE))


def save_evaluation(evaluation: Evaluation, out: Path, file: Path, state: Path, ledger: Path) -> None:
    """Write pictures to the folder `out` and numbers to `file`, which no other account may read.

    The numbers are also kept in the state directory with the ledger, if there is one: other runs replace `file`.
    """
    keep_private(out)
    for earlier in ("accuracy.png", "detected.png"):
        (out / earlier).unlink(missing_ok=True)
    if evaluation.detected is not None:
        plot_detected(evaluation.detected, out / "detected.png")
    if evaluation.measured:
        plot_accuracy(evaluation.metrics, out / "accuracy.png")
    if evaluation.extractor is not None:
        plot_neighbours(evaluation.extractor, evaluation.looked, evaluation.train, out / "neighbours.png")
    if evaluation.attacks:
        write_local(out / "membership.csv", csv_of(pd.DataFrame(map(vars, evaluation.attacks))).encode())
    write_local(file, (json.dumps(evaluation.metrics, indent=1) + "\n").encode())
    with suppress(BudgetError):
        keep_evaluation(state, evaluation.metrics | {"ledger": read_ledger(ledger)})
