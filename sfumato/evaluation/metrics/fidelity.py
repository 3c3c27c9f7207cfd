"""How near a set of images comes to another, in one feature space: the metrics of `evaluate.fidelity` for one set."""

from collections.abc import Callable, Collection

import numpy as np
from scipy.special import softmax

from sfumato.evaluation.extractors import Extractor
from sfumato.evaluation.metrics.distances import frechet_distance, inception_score, kernel_distance
from sfumato.evaluation.metrics.fld import feature_likelihood
from sfumato.evaluation.metrics.neighbours import authenticity, precision_recall

NEIGHBOURS = 5  # k of precision, recall, density, coverage
MEMORISED = -20.0  # a generalisation gap below this looks like copies


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
    copies, training, hold-out); metrics: some of `evaluate.fidelity`; warn: called with what limits a number.
    Returns {"space", "reference", "images", "reference_images", "frechet", "mmd", "mmd_std", "precision", …}.
    Distances are called "fid", "kid", "kid_std" only if the extractor is Inception.
    """
    found: dict = {"space": extractor.name, "reference": "holdout"}
    found |= {"images": len(compared), "reference_images": len(reference)}
    frechet, mmd = ("fid", "kid") if extractor.head is not None else ("frechet", "mmd")
    fewest = min(len(compared), len(reference))
    if "frechet" in metrics:
        found[frechet] = frechet_distance(compared, reference)
        if fewest <= extractor.dimension:
            warn(
                f"{name}: {fewest} images in a space of {extractor.dimension} dimensions: "
                "their covariance is rank-deficient and the Fréchet distance too large. "
                f"Compare it with distances of equally many images only; {mmd} has no such bias"
            )
    if "mmd" in metrics:
        found[mmd], found[f"{mmd}_std"] = kernel_distance(compared, reference)
    if "inception_score" in metrics and extractor.head is not None:  # without bias, as in the first Inception Score
        probabilities = softmax(compared.astype(np.float64) @ extractor.head.T, axis=1)
        found["inception_score"], found["inception_score_std"] = inception_score(probabilities)
    if "precision_recall" in metrics:
        k = min(NEIGHBOURS, fewest - 1)
        if k < NEIGHBOURS:
            warn(f"{name}: precision and recall take {k} neighbours, not {NEIGHBOURS}: there are only {fewest} images")
        found |= precision_recall(compared, reference, k) | {"neighbours": k}
    if "fld" in metrics:
        if min(map(len, novel)) < 4:
            warn(f"{name}: no feature likelihood: it needs 4 images or more of each kind")
        else:
            found |= feature_likelihood(*novel)
            if found["generalisation_gap"] < MEMORISED:
                warn(
                    f"{name}: training images are likelier than hold-out images by {-found['generalisation_gap']:.0f} "
                    "hundredths of a nat per dimension, as when images were copied. Look at neighbours.png"
                )
    if "authenticity" in metrics:
        found |= authenticity(*novel)
    return found
