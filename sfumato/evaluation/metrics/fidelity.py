"""Compare sets of images in one feature space.

METRICS lists the metrics, and `fidelity` computes them for one set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.special import softmax

from sfumato.evaluation.metrics.distances import (
    frechet_distance,
    inception_score,
    kernel_distance,
    sliced_distance,
)
from sfumato.evaluation.metrics.neighbours import NEIGHBOURS, authenticity, precision_recall
from sfumato.settings.evaluate import Evaluate

if TYPE_CHECKING:
    from sfumato.evaluation.extractors import Extractor


class Metric(NamedTuple):
    """A fidelity metric.

    meaning: description for docs/reference.md;
    measure: function that computes the metric's numbers from some arguments of `fidelity`; if None,
    `evaluate_folder` computes them from images;
    needs: name of the extractor that the metric requires, or "" if it works with any extractor;
    yardstick: whether to measure the metric for blurred images too, for comparison.
    """

    meaning: str
    measure: Callable[..., dict[str, float]] | None = None
    needs: str = ""
    yardstick: bool = False


def frechet(features: np.ndarray, reference: np.ndarray, **_: object) -> dict[str, float]:
    return {"frechet": frechet_distance(features, reference)}


def mind(
    features: np.ndarray, reference: np.ndarray, novel: tuple[np.ndarray, ...], **_: object
) -> dict[str, float]:
    """Compute MIND between the set and the hold-out, and between training images and the hold-out.

    Both distances use the same number of images, because MIND is lower for more images.
    """
    count = min(map(len, (features, reference, novel[1])))
    real = {"mind_real": sliced_distance(novel[1], reference, count)[0]}
    return with_spread("mind", sliced_distance(features, reference, count)) | real


def mmd(features: np.ndarray, reference: np.ndarray, **_: object) -> dict[str, float]:
    return with_spread("mmd", kernel_distance(features, reference))


def likelihood(novel: tuple[np.ndarray, ...], **_: object) -> dict[str, float]:
    from sfumato.evaluation.metrics.fld import feature_likelihood

    if min(map(len, novel)) < 4:
        return {}
    return feature_likelihood(*novel)


def score(features: np.ndarray, extractor: Extractor, **_: object) -> dict[str, float]:
    # The head of Inception is applied without its bias, as in the original Inception Score
    assert extractor.head is not None
    probabilities = softmax(features.astype(np.float64) @ extractor.head.T, axis=1)
    return with_spread("inception_score", inception_score(probabilities))


def with_spread(key: str, values: tuple[float, float]) -> dict[str, float]:
    return {key: values[0], f"{key}_std": values[1]}


METRICS = {
    "frechet": Metric(
        "Fréchet distance of Gaussians fitted to the features; lower is better",
        frechet,
        yardstick=True,
    ),
    "mind": Metric(
        "sliced distance between the whole distributions; images are as good as real ones if the "
        "value is at most `mind_real`",
        mind,
        yardstick=True,
    ),
    "mmd": Metric(
        "squared kernel distance, unbiased even for few images; lower is better, and it may be "
        "negative",
        mmd,
    ),
    "inception_score": Metric(
        "whether images are clear and varied; higher is better; needs Inception", score, "inception"
    ),
    "precision_recall": Metric(
        "`precision`, `density`: how much of the set lies near the hold-out; `recall`, `coverage`: "
        "how much of the hold-out lies near the set; higher is better",
        lambda features, reference, **_: precision_recall(features, reference),
        yardstick=True,
    ),
    "fld": Metric(
        "negative log-likelihood of the hold-out under Gaussians centred on the images of the set, "
        "minus the negative log-likelihood under Gaussians centred on training images; lower is "
        "better, and 0 is as good as real images",
        likelihood,
    ),
    "authenticity": Metric(
        "share of images that are farther from their nearest training image t than another "
        "training image is from t; best if equal to the value of `real`",
        lambda novel, **_: authenticity(*novel) if len(novel[1]) > 1 else {},
    ),
    "detector": Metric(
        "balanced accuracy of a small network that separates the images from the hold-out; 0.5 is "
        "best"
    ),
    "disclosure": Metric("the test for copies, described below"),
}


def chosen_metrics(config: Evaluate) -> tuple[str, ...]:
    """Return `evaluate.fidelity` or, if it is not set, all metrics that the extractor supports."""
    if config.fidelity is not None:
        return config.fidelity
    return tuple(name for name, metric in METRICS.items() if metric.needs in ("", config.extractor))


def fidelity(
    name: str,
    features: np.ndarray,
    reference: np.ndarray,
    novel: tuple[np.ndarray, np.ndarray, np.ndarray],
    extractor: Extractor,
    metrics: Collection[str],
    warn: Callable[[str], None],
) -> dict:
    """Compute the metrics of the set called `name`.

    features: (N, D), features of the set;
    reference: (M, D), features of the hold-out;
    novel: three arrays of features for the metrics that detect copies: features of the images to
    test, of training images, and of the hold-out;
    metrics: names from METRICS;
    warn: function that is called with a warning if a number is of limited use.

    Returns {"space": name of the extractor, "reference": "holdout", "images": N,
    "reference_images": M}, and the numbers of the metrics, such as "frechet" and "mmd". With
    Inception, these two are called "fid" and "kid".
    """
    numbers: dict[str, float] = {}
    for key, metric in METRICS.items():
        if key in metrics and metric.measure is not None:
            numbers |= metric.measure(
                features=features, reference=reference, novel=novel, extractor=extractor
            )
    fewest = min(len(features), len(reference))
    if "frechet" in numbers and fewest <= features.shape[1]:
        warn(
            f"{name}: the Fréchet distance is too large, because the covariance of {fewest} images "
            f"in {features.shape[1]} dimensions is rank-deficient. Compare it only with distances "
            "computed from the same number of images, or use mmd (kid), because it is unbiased "
            "even for few images"
        )
    k = numbers.get("neighbours", NEIGHBOURS)
    if k < NEIGHBOURS:
        warn(
            f"{name}: precision and recall use {k} neighbours, not {NEIGHBOURS}, because there "
            f"are only {fewest} images"
        )
    if "fld" in metrics and "fld" not in numbers:
        reason = "all hold-out images have equal features"
        if min(map(len, novel)) < 4:
            reason = "it needs 4 or more images of each set"
        warn(f"{name}: fld was not computed, because {reason}")
    gap = numbers.get("generalisation_gap", 0.0)
    if gap < -20:
        warn(
            f"{name}: generalisation_gap={gap:.0f}. Under Gaussians centred on the images of this "
            "set, training images are likelier than hold-out images. This is a sign that images "
            "were copied: look at neighbours.png"
        )
    facts = {
        "space": extractor.name,
        "reference": "holdout",
        "images": len(features),
        "reference_images": len(reference),
    }
    if extractor.head is not None:  # the extractor is Inception
        names = {"frechet": "fid", "mmd": "kid", "mmd_std": "kid_std"}
        numbers = {names.get(key, key): value for key, value in numbers.items()}
    return facts | numbers
