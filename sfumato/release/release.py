"""The release as files: images and labels, a picture, a card for programs and one for people, and further forms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sfumato.data.images import ImageSet, as_uint8, load_array, save_images
from sfumato.errors import DataError
from sfumato.privacy.resolved import StagePlan
from sfumato.release.card import cost_of, dataset_card
from sfumato.release.exports import FORMS, PUBLIC_SOURCE, mark_of
from sfumato.release.synthesis import sorted_examples
from sfumato.release.variation import Varied
from sfumato.settings.release import Synthesize
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_json
from sfumato.storage.png import save_png, to_grid

ASKED = "asked.npy"
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
    if varied.asked is not None:
        np.save(directory / ASKED, varied.asked.numpy(), allow_pickle=False)
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
    text = dataset_card(plan, labels.bincount(minlength=len(plan.classes)).tolist(), sources, varied.parts, records)
    (directory / "README.md").write_text(text, encoding="utf-8")


def plain_images(released: ImageSet, directory: Path) -> ImageSet | None:
    """The plain images of a release with the classes asked of the models. None if that is the release itself."""
    if not (directory / ASKED).exists():
        return None
    asked = load_array(directory / ASKED)
    plain = read_json(directory / "card.json")["kinds"]["plain"]
    return ImageSet(released.images[:plain], asked, released.classes)
