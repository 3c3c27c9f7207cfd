"""Refuse new images if no odometer would contain their whole cost.

There are two cases: some of the images are already counted under another dataset id, or budget was
spent on some of them and they are now assigned to other groups. The settings
`data.different_people` and `data.other_groups` permit such images.

Also refuse images on which budget was spent, if they move between the sensitive images and the
hold-out.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from PIL.Image import Resampling, fromarray

from sfumato.data.cards import CARD, read_card
from sfumato.data.images import GROUPS, IMAGES, load_array
from sfumato.data.lineage import digests
from sfumato.data.store import HOLDOUT, SENSITIVE
from sfumato.errors import ConfigError, DataError, explained
from sfumato.settings.data import Data
from sfumato.storage.documents import read_json
from sfumato.storage.journal import REGROUP, Journal

ORIGIN = "origin.json"  # private file: the source and the path from which the images were prepared
THUMBNAILS_AT_ONCE = 4096  # number of thumbnails compared at once


def refuse_another_id(
    home: Path, new_home: Path, shape: tuple[int, int, int], origin: dict
) -> None:
    """Raise ConfigError if the images in `new_home` are already counted under another dataset id.

    home: folder of the dataset; new_home: folder of its new images, which will replace `home`;
    shape: stored shape of the new images, (C, H, W);
    origin: source and path from which the new images were prepared.

    Two datasets count as the same if their origins are equal, or if an image with the same bytes
    and the same stored shape is in both. Otherwise, their grey thumbnails are compared, to detect
    resized copies.
    """
    folders = home.parent.iterdir()
    dataset_folders = {
        folder for folder in folders if (folder / CARD).exists() or (folder / ORIGIN).exists()
    }
    for other in sorted(dataset_folders - {home}):
        file = other / ORIGIN
        message = partial(
            "{file} cannot be read ({}): prepare the images of data.dataset_id={name} again".format,
            file=file,
            name=other.name,
        )
        with explained(DataError, message):
            same = file.is_file() and read_json(file) == origin
        if not same and not (other / CARD).is_file():
            continue  # `stage forget` deleted the images of `other`: only its origin is compared
        if not same and read_card(other / CARD).shape == shape:
            same = len(np.intersect1d(content_hashes(new_home), content_hashes(other))) > 0
        if same or resized_copies(new_home, other):
            raise ConfigError(
                f"data.dataset_id={home.name}: some of these images, or their folder, are already "
                f"counted under the dataset id {other.name!r}. Set data.dataset_id: {other.name}, "
                "so that one odometer counts their whole cost. If no person appears both in these "
                f"images and in {other.name!r}, set data.different_people: true"
            )


def content_hashes(home: Path, parts: Sequence[str] = (SENSITIVE, HOLDOUT)) -> np.ndarray:
    """Return a hash of each image in some parts of a set, (n,) uint64."""
    image_digests = chain.from_iterable(digests(load_array(home / part / IMAGES)) for part in parts)
    return np.fromiter((int.from_bytes(value[:8], "big") for value in image_digests), np.uint64)


def resized_copies(new_home: Path, other: Path) -> bool:
    """Return whether more than a third of the images in `new_home` resemble images in `other`.

    Copies with another size or other colours are found too. Only a sample of `new_home` is
    compared.
    """
    sample = np.concatenate([*grey_thumbnails(new_home, 500)])
    nearest = np.zeros(len(sample))
    for block in grey_thumbnails(other):
        nearest = np.maximum(nearest, (sample @ block.T).max(axis=1))
    # The similarity exceeds 0.995 for at least 97 % of resized copies, but for only 10 % of
    # different slices from the same scanner.
    return bool((nearest > 0.995).mean() > 1 / 3)


def grey_thumbnails(home: Path, max_count: int | None = None) -> Iterator[np.ndarray]:
    """Yield grey thumbnails of the sensitive images and then of the hold-out images, in batches.

    A batch is (N, 64). Each row has mean 0 and norm 1, or norm 0 for a uniform image.
    max_count: maximum number of images to choose from each part. Every call chooses the same ones.
    """
    for images in (load_array(home / part / IMAGES) for part in (SENSITIVE, HOLDOUT)):
        rows: Sequence[int] | np.ndarray = range(len(images))
        if max_count is not None and max_count < len(images):
            rows = np.sort(
                np.random.default_rng(max_count).choice(len(images), max_count, replace=False)
            )
        for start in range(0, len(rows), THUMBNAILS_AT_ONCE):
            part = rows[start : start + THUMBNAILS_AT_ONCE]
            greys = (fromarray(np.rint(images[i].mean(axis=2)).astype(np.uint8)) for i in part)
            thumbnails = [
                np.asarray(grey.resize((8, 8), Resampling.BILINEAR), np.float32).ravel()
                for grey in greys
            ]
            small = np.array(thumbnails) - np.mean(thumbnails, axis=1, keepdims=True)
            yield small / np.maximum(np.linalg.norm(small, axis=1, keepdims=True), 1e-9)


def images_charged(journal: Journal, version: str) -> set[str]:
    """Return the fingerprints of the images for which charges on `version` were opened."""
    return {
        entry["images"]
        for entry in journal.entries()
        if "images" in entry and entry["record"]["data_version"] == version
    }


def refuse_another_split(
    home: Path, new_home: Path, version: str, journal: Journal, images: str
) -> None:
    """Raise ConfigError if charged images move between the sensitive images and the hold-out.

    An earlier release would then be tested on images from which it was made. Images in both parts,
    and images that were added or removed, are ignored. A split under which a charge was opened is
    always accepted.

    home, new_home: folders of the earlier and of the new images of this version;
    images: fingerprint of the new sensitive images.
    """
    charged_fingerprints = images_charged(journal, version)
    if not charged_fingerprints or images in charged_fingerprints:
        return
    moved: set[int] = set()
    with suppress(DataError):  # the earlier images are damaged, so they cannot be compared
        (old, old_held), (new, new_held) = (
            [set(content_hashes(folder, [part]).tolist()) for part in (SENSITIVE, HOLDOUT)]
            for folder in (home, new_home)
        )
        moved = (old - old_held) & (new_held - new) | (old_held - old) & (new - new_held)
    if moved:
        raise ConfigError(
            f"data.dataset_id={home.name}: budget was already spent on version {version} of these "
            "images, and some of them would now move between the training images and the hold-out. "
            "A release would then be tested on images from which it was made. Restore what "
            "determined the hold-out: data.holdout_fraction, the ids of data.groups, or the "
            "folders train/ and test/. To keep the change, set a new data.version: every query "
            "then spends again"
        )


def refuse_regrouping(data: Data, home: Path, new_home: Path, journal: Journal) -> None:
    """Raise ConfigError if charged images are now assigned to other groups.

    If `data.other_groups` permits the change, an entry is added to the journal instead.

    home, new_home: folders of the earlier and of the new images.
    """
    if not regrouped(home, new_home, journal.records()):
        return
    if not data.other_groups:
        raise ConfigError(
            f"data.dataset_id={data.name}: budget was already spent on some of these images. "
            "Either these images would now be in other groups, or the old and new groups cannot "
            "be compared, for example because data.size changed or `stage forget` deleted the old "
            "images. Prepare the images with the earlier settings. If the earlier groups were "
            "wrong or the images were deleted, set data.other_groups: true. The journal is then "
            "kept, but ledgers and reports are marked incomplete"
        )
    journal.append(REGROUP)


def regrouped(old_home: Path, new_home: Path, records: Sequence[dict]) -> bool:
    """Return whether a new preparation assigns charged images to other groups.

    A preparation does so if it separates images of one group, or joins images of several groups.
    Only images in both prepared sets, `old_home` and `new_home`, are compared. In a set without
    groups, each image is a group of its own. An image with copies in several groups is ignored.
    Returns True if the sets cannot be compared, because their stored shapes differ or the earlier
    set is gone.
    records: records of the charges.
    """
    homes = [home for home in (old_home, new_home) if (home / SENSITIVE / IMAGES).is_file()]
    grouped = any((home / SENSITIVE / GROUPS).exists() for home in homes) or any(
        "group_weight" in r for r in records
    )
    if not records or not grouped:
        return False
    if (
        len(homes) == 1
        or len({load_array(home / SENSITIVE / IMAGES).shape[1:] for home in homes}) > 1
    ):
        return True
    old = groups_by_digest(old_home)
    new = groups_by_digest(new_home)
    pairs = {
        (*old[value], *new[value])
        for value in old.keys() & new.keys()
        if len(old[value]) == len(new[value]) == 1
    }
    return any(len({pair[side] for pair in pairs}) < len(pairs) for side in (0, 1))


def groups_by_digest(home: Path) -> dict[bytes, set[Hashable]]:
    """Map the digest of each image to the groups of all its copies.

    In a set without groups, each image is a group of its own.
    """
    digest_groups: dict[bytes, set[Hashable]] = defaultdict(set)
    for part in (SENSITIVE, HOLDOUT):
        images = load_array(home / part / IMAGES)
        file = home / part / GROUPS
        groups = load_array(file) if file.exists() else np.arange(len(images))
        for value, group in zip(digests(images), groups, strict=True):
            digest_groups[value].add((part, int(group)))
    return digest_groups
