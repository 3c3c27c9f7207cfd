"""Identify evaluations, and store their numbers privately."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.privacy.ledger import records_in
from sfumato.privacy.odometer import Odometer
from sfumato.privacy.resolved import StagePlan
from sfumato.settings.evaluate import Evaluate
from sfumato.storage.artifacts import PRIVACY
from sfumato.storage.digest import md5_of_folder
from sfumato.storage.files import json_text, replace_private

if TYPE_CHECKING:  # imports of PyTorch, which a look at the numbers does not need
    from sfumato.data.images import ImageSet
    from sfumato.evaluation.extractors import Extractor

EVALUATIONS = "evaluations"  # Folder in the state directory


def keep_evaluation(state: Path, metrics: Mapping) -> Path:
    """Store the numbers of an evaluation privately, under the hash of the release.

    metrics: content of metrics.json, including "identity", and the full ledger as "ledger".
    """
    path = state / EVALUATIONS / f"{metrics['identity']['release']}.json"
    replace_private(path, json_text(metrics).encode())
    return path


def identity(
    plan: StagePlan[Evaluate],
    key: bytes,
    version: str,
    train: ImageSet,
    holdout: ImageSet,
    extractor: Extractor | None,
    release: Path,
) -> dict[str, str]:
    """Describe the release, and everything else on which the numbers of an evaluation depend.

    The numbers of two releases can be compared if all entries except "release" are equal. Digests
    of real images are keyed, so they reveal nothing.
    """
    from sfumato.data.prepare import fingerprint

    settings = plan.settings
    amount = f"{settings.epochs} epochs"
    if settings.steps:
        amount = f"{settings.steps} steps"
    return {
        "dataset": plan.dataset_id,
        "version": version,
        "data": fingerprint(train, key),
        "holdout": fingerprint(holdout, key),
        "extractor": extractor.digest if extractor else "none",
        "reference": "holdout, plain images",
        "training": f"light, {amount}, last epoch",
        "release": md5_of_folder(release),
    }


def measured_another(metrics: Mapping, release: Path) -> bool:
    """Return whether the numbers of an evaluation are about another release than the folder's.

    git and DVC do not track these numbers, so they stay if an older release is checked out.
    """
    measured = metrics.get("identity", {}).get("release")
    return measured is not None and measured != md5_of_folder(release)


def made_from_others(artifacts: Iterable[Path], odometer: Odometer, images: str) -> bool:
    """Return whether any of the artifacts depends on a charge that was opened on other images.

    images: fingerprint of the training images as they are now.
    """
    charge_ids = {record["id"] for folder in artifacts for record in records_in(folder / PRIVACY)}
    return any(
        run.record["id"] in charge_ids and run.drew_others(images) for run in odometer.charges()
    )
