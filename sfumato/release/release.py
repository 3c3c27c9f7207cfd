"""The release as files: images and labels, a picture, a card for programs and one for people, and further forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sfumato.data.images import ImageSet, load_array, per_class, save_images
from sfumato.privacy.resolved import StagePlan
from sfumato.release.card import ASKED, LABEL_TABLE, PREPARED, cost_of, dataset_card
from sfumato.release.exports import CLASSES, FORMS, PUBLIC_SOURCE, folder_names, mark_of
from sfumato.release.loading import KINDS_FILE
from sfumato.release.synthesis import sorted_examples
from sfumato.release.variation import KINDS, PLAIN, PUBLIC, Varied
from sfumato.settings.release import Synthesize
from sfumato.storage.files import ATTRIBUTES, UNTOUCHED, csv_text, write_json
from sfumato.storage.png import named_grid, save_png, to_grid

PRIVACY = "differentially private; privacy.json holds every mechanism that was paid for, ledger.json composes them"
ENLARGED = 96  # pixels of a side that images are magnified to in the grid, and to twice as many in that of a class
SHOWN = 10  # images of each class in the pictures


def save_release(
    directory: Path,
    varied: Varied,
    sources: np.ndarray,
    records: Mapping[str, dict],
    plan: StagePlan[Synthesize],
    apart: Sequence[str] = (),
) -> None:
    """Write the released set. Pictures show unchanged images only: by them people judge what a model draws.

    sources: (N,), the stage that drew each; apart: data sets of merged owners, as `cost_of` takes them.
    """
    images, labels, drawn = varied.images, varied.labels, dict(sorted(Counter(sources.tolist()).items()))
    released = ImageSet(images.permute(0, 2, 3, 1).numpy(), labels.numpy(), plan.classes)
    save_images(directory, released)
    if plan.several:
        rows = [dict(zip(plan.classes, row, strict=True)) for row in released.labels.tolist()]
        (directory / LABEL_TABLE).write_text(csv_text(rows, dict.fromkeys(plan.classes, "")), encoding="utf-8")
    np.save(directory / KINDS_FILE, varied.kinds)
    if varied.asked is not None:
        np.save(directory / ASKED, varied.asked.numpy(), allow_pickle=False)
    mark, number = mark_of(drawn), Counter(varied.kinds.tolist())
    kinds = {name: number[name] for name in KINDS if number[name]}
    unchanged = np.isin(varied.kinds, (PLAIN, PUBLIC))
    shown = sorted_examples(images, labels, len(plan.classes), SHOWN, unchanged)
    save_png(directory / "grid.png", named_grid(shown, plan.classes, SHOWN, ENLARGED), mark.xmp)
    for name, part in zip(folder_names(plan.classes), shown.split(SHOWN), strict=True):
        save_png(directory / CLASSES / f"{name}.png", to_grid(part, SHOWN // 2, 2 * ENLARGED), mark.xmp)
    for form in plan.settings.export:
        FORMS[form](directory, released, varied.kinds, mark)
    card = {
        "images": len(images),
        "shape": list(plan.shape),
        "range": [0, 255],
        "prepared": PREPARED | plan.prepared,
        "classes": list(plan.classes),
        "sources": drawn,
        "kinds": kinds,
        **({"mixture": varied.mixture} if varied.mixture else {}),
        "labels": "teacher" if plan.settings.relabel else plan.settings.labels,
        "synthetic": PUBLIC_SOURCE not in drawn,
        "digital_source_type": mark.source_type,
        **cost_of(plan, records, apart),
        **({"apart": sorted(apart)} if apart else {}),
        "about": dict(plan.about),
        "privacy": PRIVACY,
    }
    write_json(directory / "card.json", card, ensure_ascii=False)
    counts = per_class(released.labels, len(plan.classes)).tolist()
    text = dataset_card(plan, counts, drawn, kinds, records, apart, varied.mixture)
    (directory / "README.md").write_text(text, encoding="utf-8")
    (directory / ATTRIBUTES).write_text(UNTOUCHED, encoding="utf-8")


def plain_images(released: ImageSet, directory: Path) -> ImageSet | None:
    """The plain images of a release with the classes asked of the models. None if that is the release itself."""
    if not (directory / ASKED).exists():
        return None
    asked = load_array(directory / ASKED)
    plain = np.flatnonzero(load_array(directory / KINDS_FILE)[: len(asked)] == PLAIN)
    return ImageSet(released.images[plain], asked[plain], released.classes)


def generated_images(released: ImageSet, directory: Path) -> ImageSet | None:
    """The images of a release but for public ones, where it says their kinds. None if all are public."""
    kinds = directory / KINDS_FILE
    drawn = np.flatnonzero(load_array(kinds) != PUBLIC) if kinds.exists() else np.arange(len(released))
    return released.take(drawn) if len(drawn) else None
