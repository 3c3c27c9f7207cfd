"""The release as files: images and labels, a picture, a card for programs and one for people, and further forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from sfumato.config import Synthesize
from sfumato.data.images import ImageSet, as_uint8, save_images
from sfumato.pictures import save_png, to_grid
from sfumato.release.card import dataset_card
from sfumato.release.exports import FORMS
from sfumato.release.synthesis import sorted_examples
from sfumato.resolved import StagePlan

PRIVACY = "differentially private; privacy.json holds every mechanism that was paid for, ledger.json composes them"


def save_release(
    directory: Path,
    images: Tensor,
    labels: Tensor,
    sources: Mapping[str, int],
    records: Mapping[str, dict],
    plan: StagePlan[Synthesize],
) -> None:
    """Write the released set. images: (N, C, H, W) float in [0, 1]; sources: stage -> images it drew."""
    released = ImageSet(as_uint8(images), labels.numpy(), plan.classes)
    save_images(directory, released)
    save_png(directory / "grid.png", to_grid(sorted_examples(images, labels, len(plan.classes), per_class=10), 10))
    for form in plan.settings.export:
        FORMS[form](directory, released)
    card = {
        "images": len(images),
        "shape": list(plan.shape),
        "range": [0, 255],
        "classes": list(plan.classes),
        "sources": dict(sources),
        "labels": plan.settings.labels,
        "synthetic": True,
        "privacy": PRIVACY,
    }
    (directory / "card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = dataset_card(
        dataset_id=plan.dataset_id,
        shape=plan.shape,
        classes=plan.classes,
        per_class=labels.bincount(minlength=len(plan.classes)).tolist(),
        sources=sources,
        size_hint=plan.size_hint,
        records=records,
        export=plan.settings.export,
    )
    (directory / "README.md").write_text(text, encoding="utf-8")
