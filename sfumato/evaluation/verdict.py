"""The verdict on a release: how much a classifier learns from it, compared with real images.

The verdict is local. It depends on this share:

    learned = (release - chance) / (real - chance)

Here, `release` is the balanced accuracy of the best classifier trained on the release, `real` is
the balanced accuracy of the best classifier trained on real images, and `chance` is the balanced
accuracy of guessing. If a released classifier is better than `real`, its balanced accuracy replaces
`real`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import numpy as np

from sfumato.data.images import per_class

# For each level, from best to worst: the smallest value of `learned` that reaches it, and a
# sentence. The smallest values are a convention.
VERDICT_LEVELS = {
    "good": (0.9, "a classifier learns nearly as much from this release as from the real images"),
    "fair": (
        0.5,
        "from this release, a classifier learns much of what it would learn from the real images, "
        "but not all",
    ),
    "poor": (
        0.1,
        (
            "a classifier learns little from this release: do not rely on it without a test on "
            "real images"
        ),
    ),
    "useless": (
        -math.inf,
        "a classifier learns almost nothing from this release: do not rely on it",
    ),
}
HANDED_OUT = ("teacher", "student")  # Classifiers that may be shared together with the release
UNJUDGED = "cannot be judged"
# The release is not judged if any class has fewer hold-out images than this. With several labels
# per image, each label must also be absent from at least this number of hold-out images
FEWEST_OF_A_CLASS = 10


class Verdict(TypedDict):
    """The result of `verdict`."""

    level: str
    sentence: str
    learned: float | None
    accuracy: dict[str, float]
    balanced_accuracy: dict[str, float]


def classifier_rows(values: Mapping) -> dict[str, dict]:
    """Return only the entries of classifiers from the metrics of one set."""
    return {name: row for name, row in values.items() if isinstance(row, dict) and "mean" in row}


def unjudged(reason: str) -> Verdict:
    """Return the verdict "cannot be judged". reason: a sentence without its full stop."""
    return {
        "level": UNJUDGED,
        "learned": None,
        "accuracy": {},
        "balanced_accuracy": {},
        "sentence": f"{UNJUDGED}: {reason}.",
    }


def verdict(
    metrics: Mapping[str, Any], labels: np.ndarray, classes: int, groups: np.ndarray | None = None
) -> Verdict:
    """Judge the release by the metrics of an evaluation.

    metrics: result of `evaluate_release`, with the scores of classifiers in HANDED_OUT and the
    result of `evaluate.labelling_of`, if known. Without an entry "real", perfect accuracy is
    assumed for real images;
    labels: labels of the hold-out, (N,). If images have several labels, they are (N, classes), and
    AUROC replaces accuracy and balanced accuracy;
    groups: persons of the hold-out images, (N,). Without it, each image is of a different person.

    Returns {"level", "sentence", "learned", "accuracy", "balanced_accuracy"}. "level" is one of
    VERDICT_LEVELS, "unknown" if classifiers learn nothing even from real images, or UNJUDGED if the
    hold-out is too small (see `too_few`). "learned" is the learned share, or None if the level is
    "unknown" or UNJUDGED. "accuracy" and "balanced_accuracy" map names to shares in [0, 1].
    Possible names are "chance", "majority class", "release", "teacher", "student" and "real".
    Unknown shares are left out.
    """
    counts = per_class(labels, classes)
    rows = guesses(counts, labels) | {"release": best(metrics["release"])}
    rows |= {name: metrics[name] for name in HANDED_OUT if name in metrics}
    if classifier_rows(metrics.get("real", {})):
        rows["real"] = best(metrics["real"])
    balanced = {name: row["balanced_accuracy"] for name, row in rows.items()}
    release = balanced["release"]
    chance = balanced["chance"]
    max_gain = max(balanced.get(name, 0.0) for name in (*HANDED_OUT, "real")) - chance
    if "real" not in balanced:
        max_gain = 1.0 - chance
    # The accuracy of guessing hardly ever exceeds chance by more than `min_gain`
    min_gain = 3.0 * guessing_error(labels, classes, groups)
    learned = None
    reason = too_few(counts, labels)
    if reason:
        level = UNJUDGED
        sentence = reason
    elif max_gain <= min_gain:
        level = "unknown"
        sentence = (
            "the hold-out is too small to show that classifiers trained on the real images are "
            "better than guessing, so the release cannot be judged. Put more images into test/, or "
            "raise data.holdout_fraction before the next release"
        )
    else:
        learned = (release - chance) / max_gain
        level = "useless"
        if release - chance > min_gain:
            level = level_of(learned)
        sentence = VERDICT_LEVELS[level][1]
    part = "" if learned is None else f" ({100 * max(learned, 0):.0f} % of what there is to learn)"
    parts = [f"{level}{part}: {sentence}"]
    if level != UNJUDGED:
        parts += remarks(metrics, balanced, min_gain)
    if metrics.get("mixture"):
        mixture = metrics["mixture"]["chosen"]
        parts.append(
            f"The release was made {mixture}. This choice is based on a comparison of two "
            "classifiers, one trained with public images and one without"
        )
    text = ". ".join(parts) + "."
    if "disclosure" in metrics:
        text += f" Copies: {metrics['disclosure']['sentence']}"
    accuracy = {name: row["accuracy"] for name, row in rows.items()}
    return {
        "level": level,
        "sentence": text,
        "learned": learned,
        "accuracy": accuracy,
        "balanced_accuracy": balanced,
    }


def too_few(counts: np.ndarray, labels: np.ndarray) -> str | None:
    """Return why the hold-out is too small to judge a release, or None if it is large enough.

    counts: (classes,), number of hold-out images of each class; labels: labels of the hold-out.
    """
    without = len(labels) - counts.max()
    if counts.min() < FEWEST_OF_A_CLASS:
        return (
            f"the hold-out needs at least {FEWEST_OF_A_CLASS} images of each class, but has only "
            f"{counts.min()} of the smallest class. Put more images into test/, or raise "
            "data.holdout_fraction before the next release"
        )
    if labels.ndim == 2 and without < FEWEST_OF_A_CLASS:
        return (
            f"for each label, the hold-out needs at least {FEWEST_OF_A_CLASS} images without this "
            f"label, but has only {without} without one of the labels. Put more images into test/, "
            "or raise data.holdout_fraction before the next release"
        )
    return None


def remarks(
    metrics: Mapping[str, Any], balanced: Mapping[str, float], min_gain: float
) -> Iterator[str]:
    """Yield further remarks for the owner: sentences without their full stops.

    balanced: balanced accuracies, as in `verdict`; min_gain: smallest gain over chance that counts.
    A released classifier with a smaller gain is not recommended.
    """
    better = max(HANDED_OUT, key=lambda name: balanced.get(name, 0.0))
    share = balanced.get(better, 0.0)
    real = balanced.get("real", 1.0)
    chance = balanced["chance"]
    learned = share - chance > min_gain
    if learned and share > real:
        yield (
            f"The result of the {better} ({100 * share:.0f} %) counts as 100 % of what there is to "
            "learn, because the best classifier trained on the real images reaches only "
            f"{100 * real:.0f} %"
        )
    agreed = metrics.get("agreement", 1.0)
    by_chance = metrics.get("chance_agreement", 0.0)
    if agreed - by_chance < VERDICT_LEVELS["poor"][0] * (1 - by_chance):
        yield (
            f"Only {100 * agreed:.0f} % of the drawn images have the label that was requested from "
            f"the generator ({100 * by_chance:.0f} % would be expected by chance), so the images "
            "do not show what their labels state"
        )
        if learned:
            yield f"Share the {better} instead"
    if learned and share > balanced["release"] + 0.02:
        yield (
            f"If you only need a classifier, use the {better}: it classifies better than "
            "classifiers trained on the release"
        )
    for name in HANDED_OUT:
        if metrics.get(name, {}).get("membership", {}).get("rings"):
            yield (
                f"A SIGN THAT THE {name.upper()} REMEMBERS TRAINING IMAGES: do not share the "
                f"{name} until you have found the cause"
            )


def guesses(counts: np.ndarray, labels: np.ndarray) -> dict[str, dict[str, float]]:
    """Return the accuracies of two classifiers that ignore the image: "chance" and "majority
    class".

    counts: (classes,), number of hold-out images of each class; labels: labels of the hold-out.
    "chance" guesses only classes of the hold-out.

    If images have several labels, returns only "chance", with an AUROC of 0.5.
    """
    if labels.ndim == 2:
        return {"chance": {"accuracy": 0.5, "balanced_accuracy": 0.5}}
    chance = 1 / max(int((counts > 0).sum()), 1)
    return {
        "chance": {"accuracy": chance, "balanced_accuracy": chance},
        "majority class": {
            "accuracy": float(counts.max() / len(labels)),
            "balanced_accuracy": chance,
        },
    }


def level_of(learned: float) -> str:
    return next(name for name, (threshold, _) in VERDICT_LEVELS.items() if learned >= threshold)


def guessing_error(labels: np.ndarray, classes: int, groups: np.ndarray | None = None) -> float:
    """Return the standard error of the balanced accuracy of a classifier that guesses all classes
    equally often.

    The error allows for a classifier that treats all images of one person in one class alike. If
    images have several labels, returns an upper bound for the mean AUROC of random scores instead
    (source: the variance of rank sums). For the arguments, see `verdict`.
    """
    units = np.arange(len(labels)) if groups is None else np.unique(groups, return_inverse=True)[1]
    having = labels.astype(bool) if labels.ndim == 2 else labels[:, None] == np.arange(classes)
    # Effective number of persons with images of each class, and with images of other classes
    persons, other_persons = (
        np.array([effective_number(units[rows]) for rows in part.T]) for part in (having, ~having)
    )
    if labels.ndim == 1:
        counts = persons[persons > 0]
        chance = 1 / len(counts)
        return math.sqrt(chance * (1 - chance) * (1 / counts).sum()) / len(counts)
    with np.errstate(divide="ignore"):
        errors = np.sqrt((persons + other_persons + 1) / (12 * persons * other_persons))
    varying = np.isfinite(errors)  # False for a label that all images have, or no image has
    return float(errors[varying].mean()) if varying.any() else math.inf


def effective_number(units: np.ndarray) -> float:
    """Return the effective number of persons.

    The mean over the images varies as much as a mean over n persons with one image each, where n is
    the result. If some persons have more images than others, n is below the number of persons.
    units: person of each image, numbered from 0.
    """
    sizes = np.bincount(units)
    return float(sizes.sum() ** 2 / max((sizes**2).sum(), 1))


def best(values: Mapping) -> dict[str, float]:
    """Return the highest accuracy and balanced accuracy of classifiers trained on one set."""
    rows = classifier_rows(values).values()
    return {
        "accuracy": max(row["mean"] for row in rows),
        "balanced_accuracy": max(
            float(np.mean([entry["mean"] for entry in row["per_class"]])) for row in rows
        ),
    }
