"""The verdict on a release: what a classifier learns from it, between guessing and the real images. All of it is local.

Measured by balanced accuracy, the mean over the classes: a classifier that always names the largest class has learned
nothing. The scale is the part of what there is to learn, with the best classifier on each side:

    learned = (release - chance) / (real - chance)
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sfumato.data.images import per_class
from sfumato.evaluation.plots import accuracies

# level -> the least part of what there is to learn, a convention, and what to say; the first that is met holds
LEVELS = {
    "good": (0.9, "a classifier learns nearly as much from this release as from the real images"),
    "fair": (0.5, "a classifier learns much of what the real images teach from this release, and not all"),
    "poor": (0.1, "a classifier learns little from this release: do not rely on it without a test on real images"),
    "useless": (-math.inf, "a classifier learns almost nothing from this release: do not rely on it"),
}
UNKNOWN = "classifiers learn nothing from the real images either, so nothing can be said about the release"
UNJUDGED, FEWEST = "cannot be judged", 10  # hold-out images of each class, below which nothing is judged
ERRORS = 3.0  # standard errors by which an accuracy must exceed chance to be told from it
BETTER = 0.02  # balanced accuracy by which the teacher must lead to be recommended


def verdict(found: Mapping[str, Any], labels: np.ndarray, classes: int) -> dict[str, Any]:
    """The verdict on the release of an evaluation.

    found: what `evaluate_release` returns, perhaps with "teacher", and the "mixture" of its card; labels: (N,) of the
    hold-out; classes: of the plan.
    Returns {"level": one of LEVELS, "unknown" or UNJUDGED, "sentence", "learned": the part, None if unknown,
    "accuracy" and "balanced_accuracy": {"chance", "majority class", "release", "teacher", "real"}, shares in [0, 1]}.
    labels of several are (N, classes), and AUROC stands for both accuracies: 1/2 by chance.
    Without "real", the verdict can only be too hard: perfect accuracy stands for it. If nothing was measured, the
    last warning says why.
    """
    if not accuracies(found["release"]):
        empty: dict[str, Any] = {"level": UNJUDGED, "learned": None, "accuracy": {}, "balanced_accuracy": {}}
        return empty | {"sentence": f"{UNJUDGED}: {found['warnings'][-1]}."}
    present = per_class(labels, classes)
    chance = 1 / max(int((present > 0).sum()), 1)
    guesses = {
        "chance": {"accuracy": 1 / classes, "balanced_accuracy": chance},
        "majority class": {"accuracy": float(present.max() / len(labels)), "balanced_accuracy": chance},
    }
    error = math.sqrt(chance * (1 - chance) / len(labels))
    if labels.ndim == 2:
        chance, error = 0.5, auroc_error(present, len(labels))
        guesses = {"chance": {"accuracy": chance, "balanced_accuracy": chance}}
    rows = {
        **guesses,
        "release": best(found["release"]),
        **({"teacher": found["teacher"]} if "teacher" in found else {}),
        **({"real": best(found["real"])} if accuracies(found.get("real", {})) else {}),
    }
    release, real = (rows.get(name, {}).get("balanced_accuracy", 1.0) for name in ("release", "real"))
    learned = (release - chance) / (real - chance) if real - chance > ERRORS * error else None
    if present.min() < FEWEST:
        level, learned = UNJUDGED, None
        sentence = f"the hold-out has {present.min()} images of a class, and {FEWEST} of each are needed. Hold out more"
    elif learned is None:
        level, sentence = "unknown", UNKNOWN
    else:
        clear = release - chance > ERRORS * error  # apart from chance, as far as so many images can tell
        level = level_of(learned) if clear else "useless"
        sentence = LEVELS[level][1]
    part = "" if learned is None else f" ({100 * max(learned, 0):.0f} % of what there is to learn)"
    if level != UNJUDGED and "teacher" in found and found["teacher"]["balanced_accuracy"] > release + BETTER:
        sentence += ". The teacher is a better classifier: who needs no more than a classifier should take it"
    mixture = ""
    if found.get("mixture"):
        mixture = f" It was made {found['mixture']['chosen']}, as the students of both mixtures decided."
    copies = f" Copies: {found['disclosure']['sentence']}" if "disclosure" in found else ""
    return {
        "level": level,
        "sentence": f"{level}{part}: {sentence}.{mixture}{copies}",
        "learned": learned,
        **{
            measure: {name: row[measure] for name, row in rows.items()} for measure in ("accuracy", "balanced_accuracy")
        },
    }


def level_of(learned: float) -> str:
    """The level of a part of what there is to learn."""
    return next(name for name, (least, _) in LEVELS.items() if learned >= least)


def auroc_error(having: np.ndarray, count: int) -> float:
    """Standard error of a mean AUROC of scores that tell nothing, at most: the mean of those of the labels.

    having: how many of `count` images have each label. Source: the variance of the rank-sum statistic.
    """
    both = having[(having > 0) & (having < count)].astype(float)
    return float(np.sqrt((count + 1) / (12 * both * (count - both))).mean()) if len(both) else math.inf


def best(values: Mapping[str, Any]) -> dict[str, float]:
    """The highest accuracy and the highest balanced accuracy of the classifiers trained on one set."""
    rows = accuracies(values).values()
    return {
        "accuracy": max(row["mean"] for row in rows),
        "balanced_accuracy": max(float(np.mean([one["mean"] for one in row["per_class"]])) for row in rows),
    }
