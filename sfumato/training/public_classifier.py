"""The public classifier: a network trained only on the labelled public images.

Source: RPGen stage 1; PrivImage.

No function here reads sensitive images. `sfumato.queries.histogram` counts the classifier's
predictions on sensitive images, and is charged.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch

from sfumato.data.images import ImageSet
from sfumato.errors import DataError
from sfumato.features.public_network import PublicNetwork, WhitenedCNN, build_network
from sfumato.runtime import compute
from sfumato.runtime.progress import Progress, no_progress
from sfumato.settings.training import Classifier
from sfumato.training.supervised import Schedule, accuracy, train_supervised

# Maximum number of pixels used for whitening, which takes up to 200 bytes of memory per pixel
WHITENED_PIXELS = 5000 * 64**2


def train_public_classifier(
    images: ImageSet, settings: Classifier, seed: int, progress: Progress = no_progress
) -> tuple[PublicNetwork, float]:
    """Train on a random part of the public images, and measure the accuracy on the rest.

    images: labelled public images. They are read batch by batch, so they may be memory-mapped;
    seed: fixes the split, initialisation, order and augmentation. The state of the global generator
    does not change.

    Returns the network after its last step, in evaluation mode, and its accuracy on the validation
    part, in [0, 1]. Raises DataError if the set is too small to split.
    """
    generator = np.random.default_rng(seed)
    permutation = generator.permutation(len(images))
    validation_size = max(1, round(settings.validation * len(images)))
    training = permutation[validation_size:]
    if len(training) < 2:
        raise DataError(
            f"the public set is too small to train the classifier: its number of images is "
            f"{len(images)}, but at least 2 are needed for training and {validation_size} for "
            "validation. Add public images"
        )
    schedule = Schedule(
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        weight_decay={"residual": 0.02, "whitened": 5e-4}[settings.network],
        decay_vectors=False,
        sgd=settings.network == "whitened",
        label_smoothing=0.1,
        augment=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_network(settings.network, images.shape, len(images.classes), settings.width)
        if isinstance(model, WhitenedCNN):
            number = max(1, min(5000, WHITENED_PIXELS // math.prod(images.shape[1:])))
            model.whiten(images.batch(np.sort(training[:number]))[0])
        batches = (images.batch(rows) for rows in shuffled(training, settings.batch, generator))
        train_supervised(model.to(compute.device()), batches, schedule, progress)
    return model, accuracy(model, images.take(np.sort(permutation[:validation_size])))


def shuffled(indices: np.ndarray, batch: int, order: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield full batches of indices without end, in a new order in each pass.

    The indices in a batch are sorted, so that reading from disk is faster.
    """
    batch = min(batch, len(indices))
    while True:
        indices = order.permutation(indices)
        for start in range(0, len(indices) - batch + 1, batch):
            yield np.sort(indices[start : start + batch])
