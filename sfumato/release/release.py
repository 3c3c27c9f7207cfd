"""The release as files: images and labels, a picture, a card for programs and one for people, and further forms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sfumato.config import Synthesize
from sfumato.data.images import ImageSet, as_uint8, save_images
from sfumato.files import write_json
from sfumato.pictures import save_png, to_grid
from sfumato.release.card import PHOTOGRAPHS, dataset_card
from sfumato.release.exports import FORMS
from sfumato.release.synthesis import sorted_examples
from sfumato.release.variation import Varied
from sfumato.resolved import StagePlan

PRIVACY = "differentially private; privacy.json holds every mechanism that was paid for, ledger.json composes them"


def save_release(
    directory: Path,
    varied: Varied,
    sources: Mapping[str, int],
    records: Mapping[str, dict],
    plan: StagePlan[Synthesize],
) -> None:
    """Write the released set. sources: stage -> images it drew. The picture shows plain images alone."""
    images, labels, plain = varied.images, varied.labels, varied.parts["plain"]
    released = ImageSet(as_uint8(images), labels.numpy(), plan.classes)
    save_images(directory, released)
    save_png(
        directory / "grid.png", to_grid(sorted_examples(images[:plain], labels[:plain], len(plan.classes), 10), 10)
    )
    for form in plan.settings.export:
        FORMS[form](directory, released)
    card = {
        "images": len(images),
        "shape": list(plan.shape),
        "range": [0, 255],
        "classes": list(plan.classes),
        "sources": dict(sources),
        "kinds": varied.parts,
        "labels": "teacher" if plan.settings.relabel else plan.settings.labels,
        "synthetic": PHOTOGRAPHS not in sources,
        "privacy": PRIVACY,
    }
    write_json(directory / "card.json", card, ensure_ascii=False)
    text = dataset_card(plan, labels.bincount(minlength=len(plan.classes)).tolist(), sources, varied.parts, records)
    (directory / "README.md").write_text(text, encoding="utf-8")
