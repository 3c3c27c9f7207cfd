"""The verdict on a release: how much a classifier learns from it, by balanced accuracy.

All of it is local.

The scale is the share of what can be learned, where each accuracy is the best classifier's: learned
    = (release - chance) / (real - chance)

If a released classifier is better than the best classifier trained on real images, its accuracy is
used as `real`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sfumato.data.images import per_class

# Each level has a sentence, and the smallest learned share at which it applies, which is a
# convention. The first level that is reached applies.
VERDICT_LEVELS = {
    "good": (0.9, "a classifier learns nearly as much from this release as from the real images"),
    "fair": (
        0.5,
        "a classifier learns much, but not all, of what the real images teach from this release",
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
FEWEST_OF_A_CLASS = 10  # Number of hold-out images of each class below which nothing is judged


def classifier_rows(values: Mapping) -> dict[str, dict]:
    """Return the entries of the classifiers from the metrics of one set."""
    return {name: row for name, row in values.items() if isinstance(row, dict) and "mean" in row}


def verdict(metrics: Mapping[str, Any], labels: np.ndarray, classes: int) -> dict[str, Any]:
    """Judge the release of an evaluation. Without a basis, the level is "unknown" or UNJUDGED.

    metrics: result of `evaluate_release`, perhaps with some of HANDED_OUT, the "mixture" of its
    card, and the "agreement" of its labels with the classes requested;
    labels: hold-out labels, (N,), or (N, classes): then AUROC replaces both accuracies. Without
    "real", perfect accuracy replaces it. Returns {"level": of VERDICT_LEVELS, "sentence",
    "learned": the part, None if unknown, "accuracy" and "balanced_accuracy": {"chance", "majority
    class", "release", each of HANDED_OUT, "real"}, shares in [0, 1]}.
    """
    if not classifier_rows(metrics["release"]):
        empty: dict[str, Any] = {
            "level": UNJUDGED,
            "learned": None,
            "accuracy": {},
            "balanced_accuracy": {},
        }
        return empty | {"sentence": f"{UNJUDGED}: {metrics['warnings'][-1]}."}
    present = per_class(labels, classes)
    rows = guesses(present, labels) | {"release": best(metrics["release"])}
    rows |= {name: metrics[name] for name in HANDED_OUT if name in metrics}
    if classifier_rows(metrics.get("real", {})):
        rows["real"] = best(metrics["real"])
    balanced = {name: row["balanced_accuracy"] for name, row in rows.items()}
    release = balanced["release"]
    chance = balanced["chance"]
    above = max(balanced.get(name, 0.0) for name in (*HANDED_OUT, "real")) - chance
    if "real" not in balanced:
        above = 1.0 - chance
    error = math.sqrt(chance * (1 - chance) / len(labels))
    if labels.ndim == 2:
        error = auroc_error(present, len(labels))
    clear = 3.0 * error  # margin that this number of images distinguishes from chance
    learned = None
    if present.min() < FEWEST_OF_A_CLASS:
        level = UNJUDGED
        sentence = (
            f"one class has {present.min()} hold-out images, and {FEWEST_OF_A_CLASS} per class are "
            "needed. "
        )
        sentence += "Hold out more images"
    elif above <= clear:
        level = "unknown"
        sentence = (
            "classifiers learn nothing from the real images either, so the release cannot be judged"
        )
    else:
        learned = (release - chance) / above
        level = level_of(learned) if release - chance > clear else "useless"
        sentence = VERDICT_LEVELS[level][1]
    part = "" if learned is None else f" ({100 * max(learned, 0):.0f} % of what there is to learn)"
    parts = [f"{level}{part}: {sentence}"]
    if level != UNJUDGED:
        parts += remarks(metrics, balanced)
    if metrics.get("mixture"):
        chosen = metrics["mixture"]["chosen"]
        parts.append(
            f"It was made {chosen}, by a comparison of classifiers trained on both mixtures"
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


def remarks(metrics: Mapping[str, Any], balanced: Mapping[str, float]) -> Iterator[str]:
    """Yield remarks for the owner in addition to the level, as sentences without a full stop.

    balanced: balanced accuracies, as in `verdict`.
    """
    better = max(HANDED_OUT, key=lambda name: balanced.get(name, 0.0))
    known = balanced.get(better, 0.0)
    real = balanced.get("real", 1.0)
    if known > real:
        yield (
            f"The part is measured against the {better}, which reaches {100 * known:.0f} %: a "
            f"classifier trained on the real images reaches only {100 * real:.0f} %"
        )
    agreed = metrics.get("agreement", 1.0)
    chance = balanced["chance"]
    if (agreed - chance) / (1 - chance) < VERDICT_LEVELS["poor"][0]:
        yield (
            f"The labels agree with the classes requested from the generator on {100 * agreed:.0f} "
            f"% of the images as drawn; by chance it would be {100 * chance:.0f} %: the images "
            "do not show their labels. Hand out the teacher instead"
        )
    if known > balanced["release"] + 0.02:
        yield f"The {better} is a better classifier: use it if you only need a classifier"
    for name in HANDED_OUT:
        if metrics.get(name, {}).get("membership", {}).get("rings"):
            yield (
                f"A SIGN THAT THE {name.upper()} REMEMBERS TRAINING IMAGES: find the reason before "
                "you share it"
            )


def guesses(present: np.ndarray, labels: np.ndarray) -> dict[str, dict[str, float]]:
    """Return the accuracies of classifiers that ignore the image, from the number of images per
    class.
    """
    if labels.ndim == 2:
        return {"chance": {"accuracy": 0.5, "balanced_accuracy": 0.5}}
    chance = 1 / max(int((present > 0).sum()), 1)
    return {
        "chance": {"accuracy": 1 / len(present), "balanced_accuracy": chance},
        "majority class": {
            "accuracy": float(present.max() / len(labels)),
            "balanced_accuracy": chance,
        },
    }


def level_of(learned: float) -> str:
    return next(name for name, (least, _) in VERDICT_LEVELS.items() if learned >= least)


def auroc_error(having: np.ndarray, count: int) -> float:
    """Bound the standard error of a mean AUROC by chance.

    having: number of images with each label. Source: rank sums.
    """
    both = having[(having > 0) & (having < count)].astype(float)
    return (
        float(np.sqrt((count + 1) / (12 * both * (count - both))).mean()) if len(both) else math.inf
    )


def best(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the highest accuracy and balanced accuracy of classifiers trained on one set."""
    rows = classifier_rows(values).values()
    return {
        "accuracy": max(row["mean"] for row in rows),
        "balanced_accuracy": max(
            float(np.mean([one["mean"] for one in row["per_class"]])) for row in rows
        ),
    }
