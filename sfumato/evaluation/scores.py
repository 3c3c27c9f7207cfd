"""Evaluate a release against real images.

Everything here is outside the guarantee: `scope` is "local".
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping

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
from sfumato.features.teacher_network import TeacherNetwork
from sfumato.release.variation import PLAIN
from sfumato.runtime import distributed
from sfumato.settings.evaluate import Evaluate
from sfumato.training.supervised import logits

COMPARED = 10_000  # Largest number of images on each side of a distance
SEARCHED = 30_000  # Largest number of training images searched for copies
RELEASE = "release"


def evaluate_release(
    synthetic: Mapping[str, ImageSet],
    train: ImageSet,
    holdout: ImageSet,
    config: Evaluate,
    extractor: Extractor | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict:
    """Measure downstream accuracy and fidelity of each synthetic set, and of the real set.

    The real set gives an upper bound. A collective call: each process trains a part of the
    classifiers, and only the first continues with fidelity. "real" compares real images with other
    real images, which gives the values to aim for. "blurred" compares blurred real images.

    synthetic: sets by name ("release", "plain"), with the classes and shape of `train`; fidelity is
    measured on PLAIN if it is among them;
    extractor: None only if `config` requests no fidelity.

    Raises DataError for an empty set or another shape. Returns {"scope": "local", "warnings": […],
    name: {"lr": {"mean", "std", "per_seed", …}, …, "fidelity": {…}}}: accuracies on `holdout`, in
    [0, 1], and fidelity to it. With several labels, "measure" is "AUROC", which then replaces
    accuracy. With a hold-out that is `unusable`, all entries by name are empty, and the last
    warning gives the reason.
    """
    for name, image_set in {**synthetic, "real training": train}.items():
        check_fits(name, image_set, train)
    warnings = [
        warning
        for name, image_set in synthetic.items()
        for warning in absent_classes(name, image_set)
    ]
    metrics: dict = {"scope": "local", "warnings": warnings}
    if holdout.labels.ndim == 2:
        metrics["measure"] = "AUROC"
    trained_on = dict(synthetic)
    if config.bound:
        trained_on["real"] = train
    metrics |= {name: {} for name in trained_on}
    why = unusable(holdout)
    if why is not None:
        remedy = "Give more pictures in test/, or raise data.holdout_fraction"
        warnings.append(f"nothing is measured, because {why}. {remedy}")
        return metrics
    for name, classifier, row in accuracies(trained_on, holdout, config, progress):
        metrics[name][classifier] = row
    chosen = chosen_metrics(config)
    if not chosen or not distributed.is_main():
        return metrics
    absent = absent_labels(holdout)
    if len(absent):
        names = ", ".join(repr(train.classes[label]) for label in absent[:5])
        others = " and others" if len(absent) > 5 else ""
        warnings.append(
            f"the hold-out has no image of {names}{others}: nothing is measured for these classes"
        )
    assert extractor is not None  # `build_extractor` gives one if metrics need it
    add_fidelity(metrics, looked_at(synthetic), train, holdout, chosen, extractor, progress)
    return metrics


def add_fidelity(
    metrics: dict,
    synthetic: Mapping[str, ImageSet],
    train: ImageSet,
    holdout: ImageSet,
    chosen: Collection[str],
    extractor: Extractor,
    progress: Callable[[str], None],
) -> None:
    """Add to `metrics` the fidelity of each synthetic set, and of "real" and "blurred"."""
    progress(f"real: features in {extractor.name}")
    searched = extractor(subsample(train, SEARCHED).images)
    fresh = extractor(subsample(holdout).images)
    warn = metrics["warnings"].append
    compare = functools.partial(
        fidelity, reference=fresh, extractor=extractor, metrics=chosen, warn=warn
    )
    for name, image_set in synthetic.items():
        progress(f"{name}: features and fidelity")
        features = extractor(subsample(image_set).images)
        metrics[name]["fidelity"] = compare(name, features, novel=(features, searched, fresh))
    progress("real: fidelity")
    order = np.random.default_rng(0).permutation(len(searched))
    compared = searched[subsample_indices(len(searched), COMPARED)]
    # One half of the training images is compared with the other: a set without copies.
    novel = searched[order[::2]], searched[order[1::2]], fresh
    metrics.setdefault("real", {})["fidelity"] = compare("real", compared, novel=novel)
    features = extractor(shifted("blurred", subsample(train).images))
    measured = [name for name in chosen if METRICS[name].yardstick]
    metrics["blurred"] = {
        "fidelity": compare(
            "blurred", features, metrics=measured, novel=(features, searched, fresh)
        )
    }


def looked_at(synthetic: Mapping[str, ImageSet]) -> dict[str, ImageSet]:
    """Return the sets to compare with real images. For a release, these are its plain images."""
    return {
        name: image_set
        for name, image_set in synthetic.items()
        if name != RELEASE or PLAIN not in synthetic
    }


def accuracies(
    trained_on: Mapping[str, ImageSet],
    holdout: ImageSet,
    config: Evaluate,
    progress: Callable[[str], None],
) -> Iterator[tuple[str, str, dict]]:
    """Yield (set, classifier, accuracies over the seeds) for each set and classifier.

    A collective call: each process trains some of the classifiers.
    """
    schedules = {
        (name, classifier): schedule_of(classifier, len(image_set), config.epochs, config.steps)
        for name, image_set in trained_on.items()
        for classifier in config.classifiers
    }
    moved = shifted_sets(holdout)

    def train(task: tuple[str, str, int]) -> Scored:
        name, classifier, seed = task
        if seed == config.seeds[0]:
            progress(f"{name}: {classifier}")
        return evaluate_classifier(
            classifier, trained_on[name], holdout, schedules[task[:2]], moved, seed
        )

    seeds = dict.fromkeys(trained_on, config.seeds) | {PLAIN: config.seeds[:1]}
    scored = iter(
        distributed.map_sharded(
            [(*what, seed) for what in schedules for seed in seeds[what[0]]], train
        )
    )
    for (name, classifier), schedule in schedules.items():
        of_seeds = list(itertools.islice(scored, len(seeds[name])))
        row = aggregate(of_seeds, holdout.classes, holdout.groups, holdout.compared)
        yield name, classifier, row | {"steps": schedule.steps}


def shifted_sets(holdout: ImageSet) -> dict[str, ImageSet]:
    """Return the hold-out, at most 5000 images, under each of SHIFTS; none with several labels."""
    some = subsample(holdout, 5000)
    names = SHIFTS if holdout.labels.ndim == 1 else ()
    return {name: ImageSet(shifted(name, some.images), some.labels, some.classes) for name in names}


def teacher_accuracy(teacher: TeacherNetwork, holdout: ImageSet) -> dict:
    """Return the teacher's `aggregate`, with "accuracy" and "balanced_accuracy".

    With several labels these are AUROC.
    """
    scored = scored_by(lambda part: logits(teacher, part.images), holdout, shifted_sets(holdout))
    shares = {"accuracy": scored.accuracy, "balanced_accuracy": mean_of(scored.by_class)}
    return shares | aggregate([scored], holdout.classes, holdout.groups, holdout.compared)


def check_fits(name: str, image_set: ImageSet, train: ImageSet) -> None:
    """Raise DataError for fewer than two images, or other classes or shape than `train`."""
    if len(image_set) < 2:
        raise DataError(
            f"the {name} set has {len(image_set)} images, evaluation needs two or more: add images."
        )
    same_labels = image_set.labels.shape[1:] == train.labels.shape[1:]
    if image_set.shape != train.shape or image_set.classes != train.classes or not same_labels:
        raise DataError(
            f"the {name} set has shape {image_set.shape} and {len(image_set.classes)} classes, "
            f"the real one {train.shape} and {len(train.classes)}: "
            "they were made for different data. Run the stages again."
        )


def absent_classes(name: str, image_set: ImageSet) -> Iterator[str]:
    """Yield a warning if a synthetic set has no image of a class: no classifier can learn it."""
    absent = absent_labels(image_set)
    if len(absent):
        more = f" and of {len(absent) - 1} others" if len(absent) > 1 else ""
        yield (
            f"the {name} set has no image of class {image_set.classes[absent[0]]!r}{more}: no "
            "classifier can learn it. Raise synthesize.count, or set synthesize.labels: uniform "
            "and run `stage synthesize` again"
        )


def absent_labels(image_set: ImageSet) -> np.ndarray:
    return np.flatnonzero(per_class(image_set.labels, len(image_set.classes)) == 0)


def subsample_indices(count: int, most: int) -> np.ndarray:
    """Return the indices of all rows, or of `most` rows drawn with a fixed seed, ascending."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, most, replace=False))


def subsample(image_set: ImageSet, most: int = COMPARED) -> ImageSet:
    """Return the set, or `most` of its images drawn with a fixed seed; without groups."""
    return image_set.take(subsample_indices(len(image_set), most))
