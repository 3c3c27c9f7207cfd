"""Evaluate a release against real images.

All results are outside the guarantee, so their entry "scope" is "local".
"""

import functools
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from sfumato.data.images import ImageSet, per_class
from sfumato.errors import DataError
from sfumato.evaluation.downstream import (
    Scored,
    aggregate,
    evaluate_classifier,
    mean_of,
    schedule_of,
    scored_by,
)
from sfumato.evaluation.extractors import Extractor
from sfumato.evaluation.holdout import unusable
from sfumato.evaluation.metrics.fidelity import METRICS, chosen_metrics, fidelity
from sfumato.evaluation.shift import SHIFTS, shifted
from sfumato.features.teacher_network import ImageClassifier
from sfumato.release.variation import PLAIN
from sfumato.runtime import distributed
from sfumato.runtime.progress import Say, discard
from sfumato.settings.evaluate import ClassifierName, Evaluate
from sfumato.training.supervised import logits

COMPARED = 10_000  # Maximum number of images of each set when two sets are compared
SEARCHED = 30_000  # Maximum number of training images in the search for copies
RELEASE = "release"
# The content of metrics.json, or the part of it about one set
Metrics = dict[str, Any]


def evaluate_release(
    synthetic: Mapping[str, ImageSet],
    train: ImageSet,
    holdout: ImageSet,
    config: Evaluate,
    extractor: Extractor | None = None,
    progress: Say = discard,
) -> Metrics:
    """Measure downstream accuracy and fidelity of each synthetic set, and of the real set.

    The entry "real" contains the values that real images reach: the accuracy of classifiers trained
    on `train` (only with `config.bound`), and the fidelity of `train` to the hold-out. A synthetic
    set should come close to these values. The entry "blurred" contains the fidelity of blurred
    training images.

    All processes must call this function: each trains a part of the classifiers, and only the first
    process measures fidelity.

    synthetic: sets by name ("release", "plain"), with the classes and shape of `train`. If "plain"
    is among them, fidelity is measured on it instead of "release";
    extractor: None only if `config` requests no fidelity.

    Returns {"scope": "local", "warnings": […], name of a set: {"lr": {"mean", "std", "per_seed",
    …}, …, "fidelity": {…}}}. The entry of a set contains the accuracies on `holdout`, in [0, 1], of
    classifiers trained on the set, and the fidelity of the set to `holdout`. If images have several
    labels, AUROC replaces accuracy, and "measure" is "AUROC". If the hold-out is `unusable`, the
    entries of all sets are empty, and the last warning gives the reason. Raises the errors of
    `check_fits`.
    """
    for name, image_set in {**synthetic, "real training": train}.items():
        check_fits(name, image_set, train)
    remedy = "Raise synthesize.count or set synthesize.labels: uniform, then run `stage synthesize`"
    warnings = [
        f"the {name} set has no image of some classes, so no classifier can learn these classes: "
        f"{absent}. {remedy}"
        for name, image_set in synthetic.items()
        if (absent := absent_classes(image_set))
    ]
    metrics: Metrics = {"scope": "local", "warnings": warnings}
    if holdout.labels.ndim == 2:
        metrics["measure"] = "AUROC"
    trained_on = dict(synthetic)
    if config.bound:
        trained_on["real"] = train
    metrics |= {name: {} for name in trained_on}
    reason = unusable(holdout)
    if reason is not None:
        warnings.append(
            f"nothing was measured, because {reason}. Put more pictures into test/, or raise "
            "data.holdout_fraction before the next release"
        )
        return metrics
    for name, classifier, row in accuracies(trained_on, holdout, config, progress):
        metrics[name][classifier] = row
    metric_names = chosen_metrics(config)
    if not metric_names or not distributed.is_main():
        return metrics
    if absent := absent_classes(holdout):
        warnings.append(f"nothing was measured for classes without hold-out images: {absent}")
    assert extractor is not None  # `build_extractor` returned one, because metrics are requested
    add_fidelity(metrics, looked_at(synthetic), train, holdout, metric_names, extractor, progress)
    return metrics


def add_fidelity(
    metrics: Metrics,
    synthetic: Mapping[str, ImageSet],
    train: ImageSet,
    holdout: ImageSet,
    metric_names: Collection[str],
    extractor: Extractor,
    progress: Say,
) -> None:
    """Add the fidelity of each synthetic set, of "real" and of "blurred" to `metrics`."""
    progress(f"real: features in {extractor.name}")
    train_features = extractor(subsample(train, SEARCHED).images)
    holdout_features = extractor(subsample(holdout).images)
    warn = metrics["warnings"].append
    compare = functools.partial(
        fidelity, reference=holdout_features, extractor=extractor, metrics=metric_names, warn=warn
    )
    for name, image_set in synthetic.items():
        progress(f"{name}: features and fidelity")
        features = extractor(subsample(image_set).images)
        metrics[name]["fidelity"] = compare(
            name, features, novel=(features, train_features, holdout_features)
        )
    progress("real: fidelity")
    order = np.random.default_rng(0).permutation(len(train_features))
    train_sample = train_features[subsample_indices(len(train_features), COMPARED)]
    # For metrics that detect copies, one half of the training images takes the place of a synthetic
    # set, and the other half takes the place of its training images
    novel = train_features[order[::2]], train_features[order[1::2]], holdout_features
    metrics.setdefault("real", {})["fidelity"] = compare("real", train_sample, novel=novel)
    features = extractor(shifted("blurred", subsample(train).images))
    yardsticks = [name for name in metric_names if METRICS[name].yardstick]
    metrics["blurred"] = {
        "fidelity": compare(
            "blurred",
            features,
            metrics=yardsticks,
            novel=(features, train_features, holdout_features),
        )
    }


def looked_at(synthetic: Mapping[str, ImageSet]) -> dict[str, ImageSet]:
    """Return the sets to compare with real images: all sets or, if PLAIN is among them, all sets
    except RELEASE.
    """
    return {
        name: image_set
        for name, image_set in synthetic.items()
        if name != RELEASE or PLAIN not in synthetic
    }


def accuracies(
    trained_on: Mapping[str, ImageSet], holdout: ImageSet, config: Evaluate, progress: Say
) -> Iterator[tuple[str, str, dict]]:
    """Train all classifiers on all sets, and score them on the hold-out.

    Yields (name of the set, name of the classifier, result of `aggregate` over the seeds). On the
    set PLAIN, only the first seed is used. All processes must call this function: each trains some
    of the classifiers.
    """
    schedules = {
        (name, classifier): schedule_of(classifier, len(image_set), config.epochs, config.steps)
        for name, image_set in trained_on.items()
        for classifier in config.classifiers
    }
    shifted_holdouts = shifted_sets(holdout)

    def train(task: tuple[str, ClassifierName, int]) -> Scored:
        name, classifier, seed = task
        if seed == config.seeds[0]:
            progress(f"{name}: {classifier}")
        return evaluate_classifier(
            classifier, trained_on[name], holdout, schedules[task[:2]], shifted_holdouts, seed
        )

    seeds = dict.fromkeys(trained_on, config.seeds) | {PLAIN: config.seeds[:1]}
    results = iter(
        distributed.map_sharded(
            [(*pair, seed) for pair in schedules for seed in seeds[pair[0]]], train
        )
    )
    for (name, classifier), schedule in schedules.items():
        of_seeds = list(itertools.islice(results, len(seeds[name])))
        row = aggregate(of_seeds, holdout.classes, holdout.groups, holdout.compared)
        yield name, classifier, row | {"steps": schedule.steps}


def shifted_sets(holdout: ImageSet) -> dict[str, ImageSet]:
    """Distort at most 5000 hold-out images by each of SHIFTS. Return one set per distortion.

    If images have several labels, return no sets.
    """
    sample = subsample(holdout, 5000)
    names = SHIFTS if holdout.labels.ndim == 1 else ()
    return {
        name: ImageSet(shifted(name, sample.images), sample.labels, sample.classes)
        for name in names
    }


def released_accuracy(network: ImageClassifier, holdout: ImageSet) -> dict:
    """Score a released classifier, the teacher or the student, on the hold-out.

    Returns the result of `aggregate`, with "accuracy" and "balanced_accuracy". If images have
    several labels, both are the mean AUROC.
    """
    result = scored_by(lambda part: logits(network, part.images), holdout, shifted_sets(holdout))
    shares = {"accuracy": result.accuracy, "balanced_accuracy": mean_of(result.by_class)}
    return shares | aggregate([result], holdout.classes, holdout.groups, holdout.compared)


def check_fits(name: str, image_set: ImageSet, train: ImageSet) -> None:
    """Raise DataError if a set has fewer than two images, or does not match `train` in its classes
    or in the shape of its images or labels.
    """
    if len(image_set) < 2:
        raise DataError(
            f"the {name} set is too small to evaluate (number of images: {len(image_set)}, "
            "minimum: 2). Add images; for a released set, raise synthesize.count."
        )
    if image_set.shape != train.shape:
        raise DataError(
            f"the images of the {name} set have shape {image_set.shape}, but the real images have "
            f"shape {train.shape}, so the set was made from other data. Run the stages again."
        )
    same_labels = image_set.labels.shape[1:] == train.labels.shape[1:]
    if image_set.classes != train.classes or not same_labels:
        raise DataError(
            f"the {name} set was made from other data than the real set: the classes differ, or "
            "only one of the sets has several labels per image. Run the stages again."
        )


def absent_classes(image_set: ImageSet) -> str:
    """Name at most five of the classes without images. Returns "" if there are none."""
    numbers = per_class(image_set.labels, len(image_set.classes))
    names = [repr(image_set.classes[label]) for label in np.flatnonzero(numbers == 0)]
    return ", ".join(names[:5]) + " and others" * (len(names) > 5)


def subsample_indices(count: int, max_rows: int) -> np.ndarray:
    """Return ascending indices of all `count` rows, or of `max_rows` drawn with a fixed seed."""
    if count <= max_rows:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, max_rows, replace=False))


def subsample(image_set: ImageSet, max_images: int = COMPARED) -> ImageSet:
    """Return all images of a set, or `max_images` drawn with a fixed seed."""
    return image_set.take(subsample_indices(len(image_set), max_images))
