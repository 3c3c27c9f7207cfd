"""Prepare the hold-out for an evaluation: leave out copies of training images.

The results are local.
"""

import itertools

import numpy as np
import torch.nn.functional as F

from sfumato.data.images import ImageSet, per_class
from sfumato.data.lineage import digests
from sfumato.evaluation.downstream import unit_numbers
from sfumato.runtime import distributed
from sfumato.training.supervised import apply

LOOK_ALIKES = 0.01  # Up to this share of the hold-out may resemble training images by chance
# Nearly all resized copies exceed this correlation with the original picture. At most 0.3 % of
# pictures without a copy exceed it
ALIKE = 0.9975
# If a class has a smaller share of its hold-out images left, the release is not judged
FEWEST_KEPT = 0.1
AT_ONCE = 4096  # Images to compare at a time


def without_copies(holdout: ImageSet, train: ImageSet, split: str) -> tuple[ImageSet, list[str]]:
    """Return the hold-out without copies of training images, and a list of warnings.

    If there are copies, the list contains one warning, which states their number. All processes
    must call this function. split: kind of the hold-out, as on the data card.
    """
    copied = distributed.broadcast_object(copies(holdout, train))
    if not copied.any():
        return holdout, []
    advice = (
        "Before the next release, remove near-duplicates, or set data.groups so that they belong "
        "to the same person"
    )
    if split == "official":
        advice = (
            "Put other pictures into test/, or move all pictures into train/, so that a hold-out "
            "is drawn at random"
        )
    return holdout.take(~copied), [
        "the hold-out contains copies of training images, perhaps resized (copies: "
        f"{copied.sum()} of {len(holdout)} hold-out images). These copies are left out of all "
        "results. In the tests for copies, all images that resemble another image (of another "
        f"person, if persons are known) are left out. {advice}"
    ]


def lost_classes(holdout: ImageSet, remaining: ImageSet) -> str | None:
    """Return the reason why the release cannot be judged, if nearly all hold-out images of a class
    were left out. Otherwise, return None.

    holdout: the hold-out; remaining: the hold-out without copies.
    """
    numbers = [per_class(part.labels, len(holdout.classes)) for part in (holdout, remaining)]
    labels = np.flatnonzero(numbers[1] < FEWEST_KEPT * numbers[0])
    if not len(labels):
        return None
    example = labels[0]
    return (
        "nearly all hold-out images of a class resemble training images, so they count as copies "
        f"and were left out (classes: {len(labels)}; for example, {holdout.classes[example]!r} "
        f"has {numbers[1][example]} of {numbers[0][example]} images left). If the pictures are not "
        "copies but show one scene through a fixed camera, test a classifier on pictures from "
        "another camera position. Put such pictures into test/ before the next release"
    )


def copies(holdout: ImageSet, train: ImageSet) -> np.ndarray:
    """Return whether each hold-out image is a copy of a training image, (n,) bool.

    An image with the same pixels as a training image is a copy. Images that only resemble training
    images count as copies too, if their share of the hold-out exceeds LOOK_ALIKES.
    """
    of_training = {*digests(train.images)}
    copied = np.array([value in of_training for value in digests(holdout.images)], dtype=bool)
    alike = copied.copy()
    holdout_thumbnails = thumbnails_of(holdout.images)
    for start in range(0, len(train), AT_ONCE):
        train_thumbnails = thumbnails_of(train.images[start : start + AT_ONCE])
        alike |= (holdout_thumbnails @ train_thumbnails.T).max(axis=1) > ALIKE
    if (alike & ~copied).sum() > LOOK_ALIKES * len(holdout):
        return alike
    return copied


def without_repeats(train: ImageSet, holdout: ImageSet) -> tuple[ImageSet, ImageSet]:
    """Remove, from both sets, the images that resemble an image of another person in either set.

    Tests for copies compare the two sets. If only the hold-out lost its copies of training images,
    the sets would differ even if nothing was copied into the release, and a test could give an
    alarm. Without groups, each image counts as a person. If a set would be empty, both sets are
    returned as they are.
    """
    thumbnails = np.concatenate([thumbnails_of(part.images) for part in (train, holdout)])
    units = [unit_numbers(len(part), part.groups) for part in (train, holdout)]
    persons = np.concatenate([units[0], -1 - units[1]])
    alike = np.zeros(len(thumbnails), dtype=bool)
    starts = range(0, len(thumbnails), AT_ONCE)
    blocks = [slice(start, start + AT_ONCE) for start in starts]
    for rows, columns in itertools.product(blocks, blocks):
        matches = thumbnails[rows] @ thumbnails[columns].T > ALIKE
        matches &= persons[rows, None] != persons[columns]
        alike[rows] |= matches.any(axis=1)
    parts = np.split(~alike, [len(train)])
    if not all(part.any() for part in parts):
        return train, holdout
    return train.take(parts[0]), holdout.take(parts[1])


def thumbnails_of(images: np.ndarray) -> np.ndarray:
    """Shrink images, (N, H, W, C) uint8, to 16×16 grey pixels: (N, 256) float32.

    Rows are centred and have norm 1. The rows of blank images are zero.
    """
    if not len(images):
        return np.zeros((0, 256))
    grey = apply(lambda part: F.adaptive_avg_pool2d(part.mean(dim=1), 16).flatten(1), images, "cpu")
    centred = grey - grey.mean(axis=1, keepdims=True)
    return np.asarray(centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-3))


def unusable(holdout: ImageSet) -> str | None:
    """Return the reason why nothing can be measured with this hold-out, or None if it is usable."""
    pairs = zip(digests(holdout.images), holdout.images, strict=True)
    distinct_digests = {value for value, image in pairs if (image != image[0, 0]).any()}
    if len(distinct_digests) < 2:
        return (
            "the hold-out needs at least 2 different images, not counting images of a single "
            f"colour, but has only {len(distinct_digests)} (of {len(holdout)} images)"
        )
    if (holdout.labels == holdout.labels[0]).all():
        return "all hold-out images belong to the same class or have the same labels"
    return None
