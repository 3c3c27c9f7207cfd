"""The release as files: images and labels, a picture, a card for programs and one for people, and further forms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sfumato.data.images import ImageSet, as_uint8, per_class, save_images
from sfumato.errors import DataError
from sfumato.privacy.resolved import StagePlan
from sfumato.release.card import LABEL_TABLE, cost_of, dataset_card
from sfumato.release.exports import FORMS, PUBLIC_SOURCE, mark_of
from sfumato.release.synthesis import sorted_examples
from sfumato.release.variation import Varied
from sfumato.settings.release import Synthesize
from sfumato.storage.files import csv_text, write_json
from sfumato.storage.png import save_png, to_grid

PRIVACY = "differentially private; privacy.json holds every mechanism that was paid for, ledger.json composes them"


def save_release(
    directory: Path,
    varied: Varied,
    sources: Mapping[str, int],
    records: Mapping[str, dict],
    plan: StagePlan[Synthesize],
) -> None:
    """Write the released set. sources: stage -> images it drew. The picture shows plain images only.

    Raises DataError if a model drew pixels that are not finite.
    """
    images, labels, plain = varied.images, varied.labels, varied.parts["plain"]
    if not images.isfinite().all():
        raise DataError(f"the models of {', '.join(sources)} drew pixels that are not finite: run these stages again")
    released = ImageSet(as_uint8(images), labels.numpy(), plan.classes)
    save_images(directory, released)
    several = released.labels.ndim == 2
    if several:
        rows = [dict(zip(plan.classes, row, strict=True)) for row in released.labels.tolist()]
        (directory / LABEL_TABLE).write_text(csv_text(rows, dict.fromkeys(plan.classes, "")), encoding="utf-8")
    mark = mark_of(sources)
    grid = to_grid(sorted_examples(images[:plain], labels[:plain], len(plan.classes), 10), 10)
    save_png(directory / "grid.png", grid, mark.xmp)
    for form in plan.settings.export:
        FORMS[form](directory, released, mark)
    card = {
        "images": len(images),
        "shape": list(plan.shape),
        "range": [0, 255],
        "classes": list(plan.classes),
        "sources": dict(sources),
        "kinds": varied.parts,
        "labels": "teacher" if plan.settings.relabel else plan.settings.labels,
        "synthetic": PUBLIC_SOURCE not in sources,
        "digital_source_type": mark.source_type,
        **vars(cost_of(plan, records)),
        "about": dict(plan.about),
        "privacy": PRIVACY,
    }
    write_json(directory / "card.json", card, ensure_ascii=False)
    text = dataset_card(
        plan, per_class(released.labels, len(plan.classes)).tolist(), sources, varied.parts, records, several
    )
    (directory / "README.md").write_text(text, encoding="utf-8")
