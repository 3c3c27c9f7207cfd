"""Measure how well a small network, a detector, distinguishes two sets of images.

The detector is trained on half of each set and tested on the other half. All results are local.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sfumato.data.images import ImageSet, strata
from sfumato.evaluation.downstream import fit_classifier, schedule_of
from sfumato.evaluation.shift import shifted
from sfumato.training.supervised import logits

STEPS = 200  # Training steps of the network
COMPARED = 10_000  # Maximum number of images of each set


@dataclass(frozen=True)
class Detected:
    """Result of a detector.

    accuracy: balanced accuracy on the images for testing;
    images: (N, H, W, C) uint8, the images for testing, from both sets;
    drawn: (N,) bool, whether each image comes from the first set;
    scores: (N,), higher if the detector assigns the image to the first set.
    """

    accuracy: float
    images: np.ndarray
    drawn: np.ndarray
    scores: np.ndarray


def detect(synthetic: ImageSet, real: ImageSet) -> Detected | None:
    """Measure how well a network distinguishes two sets of images.

    Both sets contribute the same number of images of each class. Returns None if this leaves fewer
    than 4 images per set.
    """
    random = np.random.default_rng(0)
    classes = len(real.classes) if real.labels.ndim == 1 else 1
    pairs = []
    for label in range(classes):
        a, b = (
            random.permutation(np.flatnonzero(strata(part.labels) == label))
            for part in (synthetic, real)
        )
        number = min(len(a), len(b), COMPARED // classes)
        pairs.append(np.stack([a[:number], b[:number]]))
    first, second = map(random.permutation, np.concatenate(pairs, axis=1))
    if len(first) < 4:
        return None
    half = len(first) // 2
    train_images = np.concatenate([synthetic.images[first[:half]], real.images[second[:half]]])
    test_images = np.concatenate([synthetic.images[first[half:]], real.images[second[half:]]])
    network = fit_classifier(
        "cnn", train_images, np.repeat([0, 1], half), 2, schedule_of("cnn", half, 1, STEPS), 0
    )
    margin = logits(network, test_images) @ np.array([1, -1], dtype=np.float32)
    is_synthetic = np.arange(len(test_images)) < len(first) - half
    accuracy = ((margin[is_synthetic] > 0).mean() + (margin[~is_synthetic] <= 0).mean()) / 2
    return Detected(float(accuracy), test_images, is_synthetic, margin)


def detections(
    sets: Mapping[str, ImageSet], train: ImageSet, holdout: ImageSet
) -> dict[str, Detected]:
    """Measure how well a detector distinguishes each set from the hold-out.

    Returns the results by name of the set. For comparison, the training images are measured as
    "real", and blurred training images as "blurred". Sets with too few images are left out.
    """
    sample = train.take(np.sort(np.random.default_rng(0).permutation(len(train))[: 2 * COMPARED]))
    blurred = ImageSet(shifted("blurred", sample.images), sample.labels, sample.classes)
    all_sets = {**sets, "real": sample, "blurred": blurred}
    pairs = ((name, detect(image_set, holdout)) for name, image_set in all_sets.items())
    return {name: detected for name, detected in pairs if detected is not None}
