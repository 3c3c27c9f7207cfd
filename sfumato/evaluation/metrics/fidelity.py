"""How near a set of images comes to another, in one feature space: the table of metrics, and those of one set."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
from scipy.special import softmax

from sfumato.evaluation.extractors import Extractor
from sfumato.evaluation.metrics.distances import frechet_distance, inception_score, kernel_distance, sliced_distance
from sfumato.evaluation.metrics.fld import feature_likelihood
from sfumato.evaluation.metrics.neighbours import NEIGHBOURS, authenticity, precision_recall
from sfumato.settings.evaluate import Evaluate

FEWEST = 4  # images of each kind, for the likelihood
MEMORISED = -20.0  # a generalisation gap below this looks like copies
PUBLISHED = {"frechet": "fid", "mmd": "kid", "mmd_std": "kid_std"}  # what numbers are called in Inception's space only


class Metric(NamedTuple):
    """What gives the numbers of a metric from a part of what `fidelity` takes; None: the stage does, from images."""

    measure: Callable[..., dict[str, Any]] | None = None
    needs: str = ""  # its extractor; any if empty
    yardstick: bool = False  # also measured of blurred real images


def mind(compared: np.ndarray, reference: np.ndarray, novel: tuple[np.ndarray, ...], **_: Any) -> dict[str, float]:
    """Of the set, and of training images: equally many, because the distance falls with their number."""
    count = min(map(len, (compared, reference, novel[1])))
    real = {"mind_real": sliced_distance(novel[1], reference, count)[0]}
    return with_spread("mind", sliced_distance(compared, reference, count)) | real


def score(compared: np.ndarray, extractor: Extractor, **_: Any) -> dict[str, float]:
    assert extractor.head is not None  # Inception's; without bias, as in the first Inception Score
    probabilities = softmax(compared.astype(np.float64) @ extractor.head.T, axis=1)
    return with_spread("inception_score", inception_score(probabilities))


def with_spread(key: str, values: tuple[float, float]) -> dict[str, float]:
    return {key: values[0], f"{key}_std": values[1]}


METRICS = {  # docs/reference.md describes each
    "frechet": Metric(lambda compared, reference, **_: {"frechet": frechet_distance(compared, reference)}, "", True),
    "mind": Metric(mind, yardstick=True),
    "mmd": Metric(lambda compared, reference, **_: with_spread("mmd", kernel_distance(compared, reference))),
    "inception_score": Metric(score, needs="inception"),
    "precision_recall": Metric(lambda compared, reference, **_: precision_recall(compared, reference), "", True),
    "fld": Metric(lambda novel, **_: feature_likelihood(*novel) if min(map(len, novel)) >= FEWEST else {}),
    "authenticity": Metric(lambda novel, **_: authenticity(*novel)),
    "detector": Metric(),
    "disclosure": Metric(),
}


def chosen_metrics(config: Evaluate) -> tuple[str, ...]:
    """`evaluate.fidelity`, filled in."""
    fitting = (name for name, metric in METRICS.items() if metric.needs in ("", config.extractor))
    return tuple(fitting) if config.fidelity is None else config.fidelity


def fidelity(
    name: str,
    compared: np.ndarray,
    reference: np.ndarray,
    novel: tuple[np.ndarray, np.ndarray, np.ndarray],
    extractor: Extractor,
    metrics: Collection[str],
    warn: Callable[[str], None],
) -> dict:
    """The metrics of the set called `name`.

    compared, reference: (N, D) and (M, D) features, of the set and of the hold-out; novel: (features to test for
    copies, training, hold-out); metrics: some of METRICS; warn: called with what limits a number.
    Returns {"space", "reference", "images", "reference_images", "frechet", "mmd", "mmd_std", "precision", …}.
    """
    given = {"compared": compared, "reference": reference, "novel": novel, "extractor": extractor}
    measures = [metric.measure for key, metric in METRICS.items() if key in metrics]
    found = {key: value for measure in measures if measure for key, value in measure(**given).items()}
    fewest = min(len(compared), len(reference))
    if "frechet" in found and fewest <= extractor.dimension:
        warn(
            f"{name}: {fewest} images in a space of {extractor.dimension} dimensions: "
            "their covariance is rank-deficient and the Fréchet distance too large. "
            "Compare it with distances of equally many images only; mmd (kid) has no such bias"
        )
    if (k := found.get("neighbours", NEIGHBOURS)) < NEIGHBOURS:
        warn(f"{name}: precision and recall take {k} neighbours, not {NEIGHBOURS}: there are only {fewest} images")
    if "fld" in metrics and "fld" not in found:
        warn(f"{name}: no feature likelihood: it needs {FEWEST} images or more of each kind, which differ")
    if found.get("generalisation_gap", 0) < MEMORISED:
        warn(
            f"{name}: training images are likelier than hold-out images by {-found['generalisation_gap']:.0f} "
            "hundredths of a nat per dimension, as when images were copied. Look at neighbours.png"
        )
    about = {
        "space": extractor.name,
        "reference": "holdout",
        "images": len(compared),
        "reference_images": len(reference),
    }
    return about | {key if extractor.head is None else PUBLISHED.get(key, key): value for key, value in found.items()}
