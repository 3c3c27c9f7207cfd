"""Write the release: images, labels, preview grids, cards, and exports to further formats."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from sfumato.data.images import IMAGES, ImageSet, load_array, per_class, save_images
from sfumato.privacy.resolved import StagePlan
from sfumato.release.card import (
    LABEL_TABLE,
    PREPARED,
    REQUESTED_LABELS,
    cost_of,
    dataset_card,
    write_readme,
)
from sfumato.release.card_check import ReleaseCard
from sfumato.release.exports import EXPORTS, PUBLIC_SOURCE, folder_names, mark_of
from sfumato.release.loading import KINDS_FILE
from sfumato.release.pattern import add_pattern, pattern_key
from sfumato.release.synthesis import sorted_examples
from sfumato.release.variation import FROM_PUBLIC, KINDS, PLAIN, VARIED_BATCH, Varied
from sfumato.settings.release import Synthesize
from sfumato.storage.files import write_csv, write_json
from sfumato.storage.png import named_grid, save_png, to_grid
from sfumato.storage.records import Records

# Minimum pixels per side of an image in the grid of all classes.
# In the grid of a single class, images have twice as many pixels per side.
ENLARGED = 96
SHOWN_PER_CLASS = 10  # Images of each class in a grid


def save_release(
    directory: Path,
    varied: Varied,
    sources: np.ndarray,
    records: Records,
    plan: StagePlan[Synthesize],
    public_source: str | None = None,
    stream: Mapping[str, object] | None = None,
) -> None:
    """Write the release into `directory`. The grids show no distorted or blended images.

    sources: (N,), name of the stage that drew or chose each image. Only the number of images
    of each stage is used;
    public_source: where the public set comes from, such as "glyphs";
    stream: entry `stream` of the card, if the release contains the networks that drew its images.
    """
    source_counts = dict(sorted(Counter(sources.tolist()).items()))
    image_set = ImageSet(
        varied.images.permute(0, 2, 3, 1).numpy(), varied.labels.numpy(), plan.classes
    )
    mark = replace(mark_of(source_counts), everywhere=plan.settings.mark != "pictures")
    pattern = mark_pixels(image_set, varied.kinds, plan)
    save_images(directory, image_set)
    if mark.everywhere:
        with (directory / IMAGES).open("ab") as file:
            file.write(mark.xmp.encode())
    if plan.several:
        rows = [dict(zip(plan.classes, row, strict=True)) for row in image_set.labels.tolist()]
        write_csv(directory / LABEL_TABLE, rows, dict.fromkeys(plan.classes, ""))
    np.save(directory / KINDS_FILE, varied.kinds)
    if varied.requested_labels is not None:
        np.save(directory / REQUESTED_LABELS, varied.requested_labels.numpy(), allow_pickle=False)
    unchanged = np.isin(varied.kinds, (PLAIN, FROM_PUBLIC))
    examples = sorted_examples(
        varied.images, varied.labels, len(plan.classes), SHOWN_PER_CLASS, unchanged
    )
    save_pictures(directory, examples, plan.classes, mark.xmp)
    for form in plan.settings.export:
        EXPORTS[form](directory, image_set, varied.kinds, mark)
    kinds = Counter(varied.kinds.tolist())
    card = {
        "images": len(image_set),
        "shape": list(plan.shape),
        "range": [0, 255],
        "prepared": PREPARED | plan.prepared,
        "classes": list(plan.classes),
        "sources": source_counts,
        "kinds": {kind: kinds[kind] for kind in KINDS if kinds[kind]},
        **({"mixture": varied.mixture} if varied.mixture else {}),
        **({"stream": stream} if stream else {}),
        "labels": "teacher" if plan.settings.relabel else plan.settings.labels,
        "synthetic": PUBLIC_SOURCE not in source_counts,
        "digital_source_type": mark.source_type,
        **pattern,
        **cost_of(plan, records),
        **records.declaration(),
        "about": dict(plan.about),
        "privacy": "differentially private; privacy.json lists every mechanism that was charged, "
        "and ledger.json composes them",
    }
    write_json(directory / "card.json", card, ensure_ascii=False)
    counts = per_class(image_set.labels, len(plan.classes)).tolist()
    text = dataset_card(plan, cast(ReleaseCard, card), counts, records, public_source)
    write_readme(directory, text)


def save_pictures(
    directory: Path, examples: torch.Tensor, classes: Sequence[str], xmp: str
) -> None:
    """Save one grid with the first images of all classes, and one larger grid for each class."""
    save_png(directory / "grid.png", named_grid(examples, classes, SHOWN_PER_CLASS, ENLARGED), xmp)
    for name, part in zip(folder_names(classes), examples.split(SHOWN_PER_CLASS), strict=True):
        save_png(
            directory / "classes" / f"{name}.png",
            to_grid(part, SHOWN_PER_CLASS // 2, 2 * ENLARGED),
            xmp,
        )


MOST_PREVIEWED = 20  # Maximum number of classes in a preview


def save_preview(path: Path, image_set: ImageSet, source: str) -> None:
    """Save the first images of a generator in one picture, with one row per class.

    The picture contains only images from `image_set`, so it is as public as these images.
    """
    names = image_set.classes[:MOST_PREVIEWED]
    columns = max(1, 8 // len(image_set.classes))
    # 1000 images are enough to contain each class
    first = image_set.take(np.arange(min(len(image_set), 1000)))
    images = torch.from_numpy(first.images).permute(0, 3, 1, 2)
    examples = sorted_examples(images, torch.from_numpy(first.labels), len(names), columns)
    save_png(path, named_grid(examples, names, columns, ENLARGED), mark_of([source]).xmp)


def mark_pixels(
    image_set: ImageSet, kinds: np.ndarray, plan: StagePlan[Synthesize]
) -> dict[str, str]:
    """Add a pattern that marks generated images (see `sfumato.release.pattern`), in place.

    The pattern is added to all images except public ones if `plan` requests it. Returns the entry
    `pattern` for the card, or an empty dict if no pattern was requested.
    """
    if plan.settings.mark != "pixels":
        return {}
    key = pattern_key(plan.dataset_id, plan.seed)
    generated_rows = np.flatnonzero(kinds != FROM_PUBLIC)
    for start in range(0, len(generated_rows), VARIED_BATCH):
        rows = generated_rows[start : start + VARIED_BATCH]
        image_set.images[rows] = add_pattern(image_set.images[rows], key)
    return {"pattern": key}


def plain_images(image_set: ImageSet, directory: Path) -> ImageSet | None:
    """Return the plain images of a release, labelled with the classes requested from the models.

    Returns None if the release has no file of requested classes.
    """
    if not (directory / REQUESTED_LABELS).exists():
        return None
    plain_rows, requested_labels = plain_requests(directory)
    return ImageSet(image_set.images[plain_rows], requested_labels, image_set.classes)


def plain_requests(directory: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of a release's plain images, and the classes requested for them."""
    requested_labels = load_array(directory / REQUESTED_LABELS)
    plain_rows = np.flatnonzero(
        load_array(directory / KINDS_FILE)[: len(requested_labels)] == PLAIN
    )
    return plain_rows, requested_labels[plain_rows]


def requested_agreement(image_set: ImageSet, directory: Path) -> tuple[float, float]:
    """Return the share of plain images that the teacher labelled with the requested class, and the
    share to expect by chance.
    """
    plain_rows, requested_labels = plain_requests(directory)
    labels = image_set.labels[plain_rows]
    shares = [
        per_class(each, len(image_set.classes)) / len(plain_rows)
        for each in (labels, requested_labels)
    ]
    return float((labels == requested_labels).mean()), float(shares[0] @ shares[1])


def generated_images(image_set: ImageSet, directory: Path) -> ImageSet | None:
    """Return the images of a release without the public ones, or None if all are public.

    If the release does not record the kinds of its images, all images are returned.
    """
    kinds = directory / KINDS_FILE
    if not kinds.exists():
        return image_set
    generated_rows = np.flatnonzero(load_array(kinds) != FROM_PUBLIC)
    if not len(generated_rows):
        return None
    return image_set.take(generated_rows)
