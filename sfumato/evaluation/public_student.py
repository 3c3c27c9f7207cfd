"""Score sets of images by a linear classifier on the features of a public network.

Tables and messages call this classifier the second student. A new classifier is trained on each
set. The scores can be compared between sets, but not with the scores of other classifiers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from sfumato.data.images import ImageSet, Shape
from sfumato.errors import ConfigError
from sfumato.evaluation.downstream import Scored, aggregate, scored_by, shuffled_batches
from sfumato.evaluation.extractors import Extractor, own_extractor
from sfumato.evaluation.scores import subsample
from sfumato.features.efficientnet_lite import imagenet_network
from sfumato.features.scattering import DeepScattering
from sfumato.settings.evaluate import Evaluate
from sfumato.storage.digest import digest_of
from sfumato.training.supervised import Schedule, train_supervised


def public_extractor(settings: Evaluate, shape: Shape, warnings: list[str]) -> Extractor | None:
    """Return the extractor that `evaluate.public_student` names, or None if it is not set.

    shape: (C, H, W) of the images. If the extractor's weights are not installed, add a warning to
    `warnings` and return None.
    """
    network = settings.public_student
    if network is None:
        return None
    if network == "scattering":
        embed = DeepScattering(shape)
        return Extractor(name=network, digest=digest_of(["deep-scattering", *shape]), embed=embed)
    try:
        if network == "imagenet":
            network = imagenet_network()
    except ConfigError as error:
        warnings.append(f"the second student (evaluate.public_student) was not trained: {error}")
        return None
    return replace(own_extractor(network), name=network.architecture)


def score_students(
    extractor: Extractor,
    trained_on: Mapping[str, ImageSet],
    holdout: ImageSet,
    seeds: Sequence[int],
) -> dict:
    """Train a student on each set with each seed, and score it on `holdout`.

    At most `scores.COMPARED` images of each set are used.

    Returns {"network", "trained_on": {name of the set: result of `aggregate`}}.
    """
    rows = {}
    for name, image_set in trained_on.items():
        results = [score_student(extractor, subsample(image_set), holdout, seed) for seed in seeds]
        rows[name] = aggregate(results, holdout.classes, holdout.groups)
    return {"network": extractor.name, "trained_on": rows}


def score_student(extractor: Extractor, train: ImageSet, holdout: ImageSet, seed: int) -> Scored:
    """Train a linear classifier on the features of `train`, and score it on `holdout`.

    Features are shifted and scaled, so that they have mean 0 and standard deviation 1 on `train`.
    seed: determines the initial weights and the order of the images.
    """
    train_features, holdout_features = (
        torch.from_numpy(extractor(part.images)) for part in (train, holdout)
    )
    mean = train_features.mean(dim=0)
    spread = train_features.std(dim=0) + 1e-6
    schedule = Schedule(steps=600, learning_rate=2e-3, weight_decay=1e-2)
    batches = shuffled_batches(
        lambda rows: (train_features[rows] - mean) / spread, train.labels, schedule.batch
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Linear(train_features.shape[1], len(train.classes))
        train_supervised(model, batches, schedule)
    answers = model((holdout_features - mean) / spread).detach().numpy()
    return scored_by(lambda _: answers, holdout, {})
