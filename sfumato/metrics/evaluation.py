"""The evaluation of a release against real images. Everything here is outside the guarantee: `scope` says "local"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from sfumato.config import Evaluate
from sfumato.errors import DataError
from sfumato.images import ImageSet
from sfumato.metrics.downstream import cnn_features, score, train_classifier
from sfumato.metrics.frechet import frechet_distance
from sfumato.models.classifier import FEATURES

SPACE = f"cnn-real-{FEATURES}"  # features of a CNN trained on real images: no Inception, comparable within one dataset only
FRECHET_IMAGES = 10_000  # at most so many images teach the feature network, and enter each side of a distance


def evaluate_release(
    synthetic: Mapping[str, ImageSet],
    train: ImageSet,
    holdout: ImageSet,
    config: Evaluate,
    progress: Callable[[str], None] = lambda _: None,
) -> dict:
    """Downstream accuracy and Fréchet distance of each synthetic set, and of the real one as the bound.

    synthetic: sets by name ("release", "auxiliary", …), of the classes and shape of `train`; "real" is taken. `progress` is told what
    comes next. Returns {"scope": "local", name: {"lr": {"mean", "std", "per_seed"}, …, "frechet": {"space", "value", "images"}}},
    accuracies on `holdout` as shares in [0, 1]. The distance is to `train`; under "real" it is that of `holdout`, the value to aim for.
    Raises DataError where a set is empty or does not fit.
    """
    for name, image_set in {**synthetic, "real training": train, "hold-out": holdout}.items():
        check_fits(name, image_set, train)
    if "real" in synthetic:
        raise ValueError("a synthetic set cannot be named 'real': that is the bound")
    progress("feature network")
    seen = some(train)
    network = train_classifier("cnn", seen.images, seen.labels, len(train.classes), config.epochs, seed=0)
    reference = cnn_features(network, seen.images)

    metrics: dict = {"scope": "local"}
    trained_on = {**synthetic, **({"real": train} if config.bound else {})}
    for name, image_set in trained_on.items():
        metrics[name] = {}
        for classifier in config.classifiers:
            progress(f"{name}: {classifier}")
            metrics[name][classifier] = score(classifier, image_set, holdout, config.epochs, config.seeds)
        compared = some(holdout if name == "real" else image_set)
        value = frechet_distance(cnn_features(network, compared.images), reference)
        metrics[name]["frechet"] = {"space": SPACE, "value": value, "images": len(compared)}
    return metrics


def check_fits(name: str, image_set: ImageSet, train: ImageSet) -> None:
    if len(image_set) < 2:
        fix = "raise data.holdout_fraction or add images"
        raise DataError(f"the {name} set holds {len(image_set)} images, evaluation needs two or more: {fix}.")
    if image_set.shape != train.shape or image_set.classes != train.classes:
        raise DataError(
            f"the {name} set has shape {image_set.shape} and {len(image_set.classes)} classes, the real one {train.shape} and "
            f"{len(train.classes)}: they were made for different data. Run the stages again."
        )


def some(image_set: ImageSet) -> ImageSet:
    """The set, or FRECHET_IMAGES of it drawn with a fixed seed."""
    if len(image_set) <= FRECHET_IMAGES:
        return image_set
    index = np.sort(np.random.default_rng(0).choice(len(image_set), FRECHET_IMAGES, replace=False))
    return ImageSet(image_set.images[index], image_set.labels[index], image_set.classes)


def plot_accuracy(metrics: dict, path: Path) -> None:
    """Draw the accuracies of `evaluate_release` as bars, one group per set and one bar per classifier, ± one standard deviation."""
    from matplotlib.figure import Figure  # heavy: only when used

    sets = [name for name, values in metrics.items() if isinstance(values, dict)]
    classifiers = [name for name in metrics[sets[0]] if name != "frechet"]
    width, colours = 0.8 / len(classifiers), ("#9db4c0", "#5c7f9c", "#253d5b")
    figure = Figure(figsize=(max(5.0, 1.2 + 0.65 * len(classifiers) * len(sets)), 3.6), layout="constrained")
    axes = figure.subplots()
    for i, classifier in enumerate(classifiers):
        places = np.arange(len(sets)) + (i - (len(classifiers) - 1) / 2) * width
        heights, spread = ([100 * metrics[name][classifier][key] for name in sets] for key in ("mean", "std"))
        bars = axes.bar(places, heights, width * 0.92, yerr=spread, capsize=3, label=classifier, color=colours[i % 3], ecolor="#444444")
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    axes.set_xticks(range(len(sets)), sets)
    axes.set_ylim(0, 110)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("accuracy on real hold-out, %")
    axes.set_title("Classifiers by what they were trained on (local: not for release)", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(classifiers), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None} if path.suffix == ".png" else None)
