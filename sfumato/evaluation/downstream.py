"""Downstream accuracy: train a classifier on one set, and score it on another set.

No choice in the training depends on the set on which the classifier is scored.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.special import softmax
from torch import Tensor

from sfumato.data.images import ImageSet
from sfumato.evaluation.classifiers import CLASSIFIERS, Classifier, build_classifier
from sfumato.runtime import compute
from sfumato.training.supervised import Schedule, logits, to_tensor, train_supervised

MIN_STEPS = 600  # Minimum number of gradient steps; a small set gets more passes to reach it
Cells = np.ndarray | None  # One value per image, or None
FEWEST_OF_A_GROUP = 10  # Groups with fewer images are merged into "others"
BINS = 15  # Number of bins of confidence, for the calibration error
SPECIFICITY = 0.9  # Specificity at which the sensitivity to each of two classes is measured
RESAMPLES = 1000  # Number of bootstrap resamples of the hold-out, for a confidence interval


def schedule_of(name: str, count: int, epochs: int, steps: int | None = None) -> Schedule:
    """Return the schedule for `count` images: `steps` gradient steps or, if None, `epochs` passes.

    If `epochs` passes have fewer than MIN_STEPS steps, the schedule has MIN_STEPS steps.
    """
    spec = CLASSIFIERS[name]
    return Schedule(
        steps=steps or max(epochs * math.ceil(count / Schedule.batch), MIN_STEPS),
        learning_rate=spec.peak_learning_rate,
        weight_decay=spec.weight_decay,
        augment=spec.augment,
    )


def fit_classifier(
    name: str, images: np.ndarray, labels: np.ndarray, classes: int, schedule: Schedule, seed: int
) -> Classifier:
    """Train classifier `name`, one of CLASSIFIERS; return it in evaluation mode.

    images: (N, H, W, C) uint8;
    labels: (N,), or (N, classes) of 0 and 1;
    seed: determines the training. PyTorch's global random state does not change.
    """
    device = compute.device().type
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_classifier(name, (images.shape[3], *images.shape[1:3]), classes).to(device)
        batches = shuffled_batches(
            lambda rows: to_tensor(images[rows.numpy()], device), labels, schedule.batch
        )
        train_supervised(model, batches, schedule)
    return model


def shuffled_batches(
    take: Callable[[Tensor], Tensor], labels: np.ndarray, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of inputs and labels without end, in a new order in each pass.

    A batch has at least two rows, as batch norm requires. The global random generator decides the
    order. take: function from row numbers to inputs.
    """
    targets = torch.from_numpy(np.array(labels, dtype=np.int64))
    while True:
        order = torch.randperm(len(targets))
        if len(order) == 1:
            order = order.repeat(2)
        for rows in order.split(size):
            if len(rows) > 1:
                yield take(rows), targets[rows]


@dataclass(frozen=True)
class Scored:
    """The scores of one trained classifier on the hold-out.

    If images have several labels, `accuracy` is the mean AUROC of the labels, `by_class` is the
    AUROC of each label, and the other fields are empty.

    accuracy: accuracy on the hold-out;
    by_class: accuracy for each class, None for a class without images (for AUROC, see `auroc`);
    shifted: accuracy under each distortion of the hold-out;
    right: (N,) bool, whether each image was classified correctly;
    calibration: expected calibration error;
    odds: (N,) log odds of the second class, if there are two classes and both have images;
    second: (N,) bool, whether each image is of the second class.
    """

    accuracy: float
    by_class: list[float | None]
    shifted: dict[str, float] = field(default_factory=dict)
    right: np.ndarray | None = None
    calibration: float | None = None
    odds: np.ndarray | None = None
    second: np.ndarray | None = None


def evaluate_classifier(
    name: str,
    train: ImageSet,
    holdout: ImageSet,
    schedule: Schedule,
    shifted_holdouts: Mapping[str, ImageSet],
    seed: int,
) -> Scored:
    """Train a classifier on `train`. Score it on `holdout`, and on `shifted_holdouts`, distorted
    versions of `holdout`.

    Guarantee: no choice depends on `holdout`, which is used only after training.
    """
    model = fit_classifier(name, train.images, train.labels, len(train.classes), schedule, seed)
    return scored_by(lambda part: logits(model, part.images), holdout, shifted_holdouts)


def scored_by(
    scores: Callable[[ImageSet], np.ndarray],
    holdout: ImageSet,
    shifted_holdouts: Mapping[str, ImageSet],
) -> Scored:
    """Score a classifier on `holdout`, and on distorted versions of it, `shifted_holdouts`.

    scores: function from a set to (N, classes) logits.
    """
    holdout_scores = scores(holdout)
    if holdout.labels.ndim == 2:
        by_label = auroc(holdout_scores, holdout.labels)
        return Scored(mean_of(by_label), by_label)
    right = holdout_scores.argmax(axis=1) == holdout.labels
    by_class: list[float | None] = []
    for label in range(len(holdout.classes)):
        of_class = right[holdout.labels == label]
        by_class.append(float(of_class.mean()) if len(of_class) else None)
    shares = {
        name: float((scores(part).argmax(axis=1) == part.labels).mean())
        for name, part in shifted_holdouts.items()
    }
    odds = None
    if len(holdout.classes) == 2 and None not in by_class:
        odds = holdout_scores[:, 1] - holdout_scores[:, 0]
    calibration = calibration_error(holdout_scores, holdout.labels)
    return Scored(
        float(right.mean()), by_class, shares, right, calibration, odds, holdout.labels == 1
    )


def calibration_error(scores: np.ndarray, labels: np.ndarray) -> float:
    """Compute the expected calibration error of (N, classes) logits, with BINS bins of confidence.

    Source: Guo et al. 2017, Eq. 3.
    """
    confidence = softmax(scores.astype(np.float64), axis=1).max(axis=1)
    excess = confidence - (scores.argmax(axis=1) == labels)
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    return float(np.abs(np.bincount(bins, excess)).sum() / len(labels))


def auroc(scores: np.ndarray, labels: np.ndarray) -> list[float | None]:
    """Compute the AUROC of each label. scores, labels: (N, classes).

    The AUROC is None for a label that all images have, or that no image has.
    """
    from sklearn.metrics import roc_auc_score

    columns = zip(labels.T, scores.T, strict=True)
    return [
        float(roc_auc_score(has_label, label_scores))
        if 0 < has_label.sum() < len(has_label)
        else None
        for has_label, label_scores in columns
    ]


def mean_of(by_label: Sequence[float | None]) -> float:
    """Return the mean of all values except None. If all are None, return 1/2, as for guessing."""
    return float(np.mean([value for value in by_label if value is not None] or [0.5]))


def aggregate(
    results: Sequence[Scored], classes: Sequence[str], groups: Cells = None, compared: Cells = None
) -> dict:
    """Average the accuracies, in [0, 1], of classifiers that differ only in their seed.

    groups: see `resampled`; compared: (N,) text, see `by_column`.

    Returns {"mean", "std", "per_seed", "per_class": [{"class", "mean", "std"}, …], "shifted":
    {distortion: mean}}. For a single seed, "std" is None. "per_class" leaves out classes whose
    accuracy is None.

    If images have one label each, the result has more entries: "interval" (see
    `bootstrap_interval`); "calibration", the mean of the calibration errors; "two_classes" (see
    `ranked`), if there are two classes and both have images; and "by_column" (see `by_column`), if
    `compared` is given.
    """
    per_seed = [result.accuracy for result in results]
    by_class = zip(classes, zip(*(result.by_class for result in results), strict=True), strict=True)
    per_class = [
        {"class": name} | mean_and_std(values) for name, values in by_class if values[0] is not None
    ]
    shifted = {
        name: float(np.mean([result.shifted[name] for result in results]))
        for name in results[0].shifted
    }
    row = mean_and_std(per_seed) | {
        "per_seed": per_seed,
        "per_class": per_class,
        "shifted": shifted,
    }
    answers = [result.right for result in results if result.right is not None]
    if answers:
        right = np.mean(answers, axis=0)
        row["interval"] = bootstrap_interval(right, groups)
        row["calibration"] = float(np.mean([result.calibration for result in results]))
        if results[0].odds is not None:
            row["two_classes"] = ranked(results, classes, groups)
        if compared is not None:
            row["by_column"] = by_column(right, groups, compared)
    return row


def bootstrap_interval(right: np.ndarray, groups: np.ndarray | None = None) -> list[float]:
    """Compute the 95 % bootstrap interval of an accuracy, [low, high], by resampling the hold-out.

    right: (N,), for each image the share of classifiers that classify it correctly; groups: see
    `resampled`. If the accuracy is 0 or 1, all resamples would be equal, so the Clopper–Pearson
    interval is returned instead, with the number of persons as the number of trials. For any other
    accuracy, returns [] if all images are of one person.
    """
    persons = int(unit_numbers(len(right), groups).max()) + 1
    if right.min() == 1:
        return [0.025 ** (1 / persons), 1.0]
    if right.max() == 0:
        return [0.0, 1 - 0.025 ** (1 / persons)]
    if persons == 1:
        return []
    return interval_of([right @ counts / counts.sum() for counts in resampled(len(right), groups)])


def interval_of(values: Sequence) -> Any:
    """Return the interval [low, high] that contains the middle 95 % of resampled values.

    values: numbers, or rows of numbers. For rows, one interval per column is returned.
    """
    return np.quantile(values, [0.025, 0.975], axis=0).T.tolist()


def resampled(count: int, groups: Cells = None) -> Iterator[np.ndarray]:
    """Yield, for each of RESAMPLES bootstrap resamples, how often it contains each image, (N,).

    groups: (N,), equal numbers for images of one person, which are drawn together.
    """
    units = unit_numbers(count, groups)
    number = int(units.max()) + 1
    random = np.random.default_rng(0)
    for _ in range(RESAMPLES):
        yield np.bincount(random.integers(number, size=number), minlength=number)[units]


def unit_numbers(count: int, groups: Cells = None) -> np.ndarray:
    """Number the persons from 0, and return each image's person, (count,) int64.

    groups: (count,), equal numbers for images of one person. Without it, each image is its own
    unit.
    """
    return np.arange(count) if groups is None else np.unique(groups, return_inverse=True)[1]


def ranked(results: Sequence[Scored], classes: Sequence[str], groups: Cells = None) -> list[dict]:
    """Compute the numbers that medical studies with two classes usually report: the AUROC, and the
    sensitivity to each class.

    For the sensitivity to a class, the threshold is chosen so that at least the share SPECIFICITY
    of the other class is classified correctly. The sensitivity is the share of the class that is
    then classified correctly. Returns [{"what", "mean", "interval"}, …], with means over the seeds.
    An interval is [] if all resamples have the same value.
    """
    second = results[0].second
    assert second is not None

    def numbers(weights: np.ndarray) -> np.ndarray:
        return np.mean([sensitivities(result.odds, second, weights) for result in results], axis=0)

    resamples = (
        counts
        for counts in resampled(len(second), groups)
        if counts[second].any() and counts[~second].any()
    )
    intervals = interval_of([numbers(counts) for counts in resamples])
    names = ["AUROC", *(f"sensitivity to {name}" for name in classes)]
    rows = zip(names, numbers(np.ones(len(second))).tolist(), intervals, strict=True)
    return [
        {"what": name, "mean": mean, "interval": interval if np.ptp(interval) > 1e-9 else []}
        for name, mean, interval in rows
    ]


def sensitivities(odds: Any, second: np.ndarray, weights: np.ndarray) -> list[float]:
    """Return the AUROC and the sensitivities to the first and the second class.

    odds, second: see `Scored`; weights: (N,) number of times that each image counts.
    """
    from sklearn.metrics import auc, roc_curve

    # fpr, tpr: shares of the first and of the second class that are classified as the second
    fpr, tpr, _ = roc_curve(second, odds, sample_weight=weights, drop_intermediate=False)
    to_first = 1 - fpr[tpr >= SPECIFICITY - 1e-9].min()
    to_second = tpr[fpr <= 1 - SPECIFICITY + 1e-9].max()
    return [float(auc(fpr, tpr)), float(to_first), float(to_second)]


def by_column(right: np.ndarray, groups: Cells, compared: np.ndarray) -> dict:
    """Compute accuracy and interval for each value of the column that `data.compare_by` names, and
    the difference between the best and the worst accuracy.

    Values with fewer than FEWEST_OF_A_GROUP images are merged into "others". If "others" has too
    few images as well, it is left out.

    compared: (N,) text, the cells of the column; right: see `bootstrap_interval`; groups: see
    `resampled`.

    Returns {"groups": [{"group", "images", "mean", "interval"}, …], "gap": the difference,
    "withheld": number of images left out}.
    """
    values, counts = np.unique(compared, return_counts=True)
    cells = np.where(np.isin(compared, values[counts < FEWEST_OF_A_GROUP]), "others", compared)
    rows = []
    withheld = len(right)
    for value in np.unique(cells):
        in_group = cells == value
        if in_group.sum() >= FEWEST_OF_A_GROUP:
            withheld -= int(in_group.sum())
            interval = bootstrap_interval(
                right[in_group], None if groups is None else groups[in_group]
            )
            entry = {"group": str(value), "images": int(in_group.sum())}
            rows.append(entry | {"mean": float(right[in_group].mean()), "interval": interval})
    gap = float(np.ptp([row["mean"] for row in rows] or [0.0]))
    return {"groups": rows, "gap": gap, "withheld": withheld}


def mean_and_std(values: Sequence) -> dict[str, float | None]:
    """Return the mean and the sample standard deviation, which is None for a single value."""
    return {
        "mean": float(np.mean(values)),
        "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
    }
