"""Test whether a release is nearer to its training images than to strangers. The result is local.

Strangers are hold-out images. Training images and strangers are sorted by their distance to the
release. If the release treats both alike, all orders are equally likely, so the number of training
images nearer than the k-th nearest stranger has a known distribution. An image at the same distance
as the k-th stranger does not count as nearer.

Source: Amin et al. 2026 (arXiv 2606.16952); Steinke et al. 2023, for the bound on ε from one run.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy.special import logit
from scipy.stats import beta, hypergeom

from sfumato.data.images import ImageSet
from sfumato.data.lineage import digests
from sfumato.evaluation.extractors import Extractor
from sfumato.evaluation.metrics.neighbours import nearest_rows
from sfumato.features.teacher_network import ImageClassifier, classify
from sfumato.release.report import grouped

FALSE_ALARMS = 0.001  # Maximum probability of an alarm if nothing was copied
# The lower bound on ε uses two confidence limits. Each is wrong with at most this probability
MISSED = 0.025
MOST_RELEASED = 60_000  # Maximum number of released images to compare
# Maximum number of training images, and of hold-out images.
# More images would take minutes longer, but would not detect smaller shares of copies.
MOST_REAL = 20_000


def disclosure(
    generated: ImageSet | None,
    train: ImageSet,
    holdout: ImageSet,
    extractor: Extractor,
    extra_images: np.ndarray | None = None,
) -> dict:
    """Test whether training images are nearer to the released images than hold-out images are.

    `compare_nearness` describes the test. If persons are known, all images of a person form one
    unit. Otherwise, equal images form one unit. The distance of a unit is the distance of its
    nearest image or mirror image. If a set is large, only some of its units, drawn at random, are
    tested.

    generated: released images that were generated, or None if all are public;
    extra_images: (n, H, W, C) uint8, further images drawn from the released networks, as any
    recipient can draw them.

    Returns the result of `compare_nearness` or, if `generated` is None, only "sentence".
    """
    if generated is None:
        return {
            "sentence": (
                "not tested, because all released images are public: no image was made from a "
                "training image."
            )
        }
    random = np.random.default_rng(0)
    released_features = extractor(
        generated.images[random.permutation(len(generated))[:MOST_RELEASED]]
    )
    if extra_images is not None:
        released_features = np.concatenate([released_features, extractor(extra_images)])

    def nearness_of(real: ImageSet) -> np.ndarray:
        mirrored = real.images[:, :, ::-1].copy()
        views = [
            nearest_rows(extractor(images), released_features)[1]
            for images in (real.images, mirrored)
        ]
        return np.minimum(*views)

    return compare_sets(nearness_of, train, holdout, random)


def membership(network: ImageClassifier, train: ImageSet, holdout: ImageSet) -> dict:
    """Test whether a network has lower losses on training images than on hold-out images.

    `compare_nearness` describes the test. Losses are used as distances. Returns the result of
    `compare_nearness` without "sentence", which describes distances to a release.
    """

    def losses(real: ImageSet) -> np.ndarray:
        shares = classify(network, real).double().clamp(1e-12, 1 - 1e-12).numpy()
        if real.labels.ndim == 1:
            return -np.log(shares[np.arange(len(shares)), real.labels])
        return -np.log(np.where(real.labels > 0, shares, 1 - shares)).sum(axis=1)

    result = compare_sets(losses, train, holdout, np.random.default_rng(0))
    del result["sentence"]
    return result


def compare_sets(
    nearness_of: Callable[[ImageSet], np.ndarray],
    train: ImageSet,
    holdout: ImageSet,
    random: np.random.Generator,
) -> dict:
    """Run `compare_nearness` on two sets. The images of each set form units as in `disclosure`.

    nearness_of: function from n images to (n,) numbers, which are smaller for nearer images.
    """
    nearness = []
    for real in (train, holdout):
        names = np.array([*digests(real.images)]) if real.groups is None else real.groups
        units = np.unique(names, return_inverse=True)[1]
        drawn_units = random.permutation(units.max() + 1) < (units.max() + 1) * min(
            1.0, MOST_REAL / len(real)
        )
        rows = np.flatnonzero(drawn_units[units])
        min_nearness = np.full(len(drawn_units), np.inf)
        np.minimum.at(min_nearness, units[rows], nearness_of(real.take(rows)))
        nearness.append(min_nearness[drawn_units])
    return compare_nearness(
        nearness[0], nearness[1], "images" if train.groups is None else "persons"
    )


def compare_nearness(
    train_distances: np.ndarray, stranger_distances: np.ndarray, unit: str
) -> dict:
    """Test whether too many training units are nearer to the release than the k-th nearest
    stranger.

    train_distances: (n,), distances of the training units to the release; stranger_distances:
    (m,), distances of the strangers to the release; unit: "images" or "persons".

    There are two tests, with k = 1 and k = m/100 (rounded up), so each p-value is doubled. If m is
    at most 100, there is only the test with k = 1, and its p-value is not doubled.

    Returns a dict with these entries:

    - "near", "chance", "rank": the number of training units nearer than the k-th stranger, the
      number expected by chance, and k. If there is an alarm, they are from the test with the
      smaller p-value, otherwise from the test with k = m/100;
    - "p", "epsilon": the smaller p-value and the larger 95 % lower bound on ε of the two tests;
    - "units", "strangers": n and m;
    - "rings": whether there is an alarm, which means that "p" is at most FALSE_ALARMS;
    - "unseen": the largest number of copies that could remain undetected. If it is n, the test
      cannot give an alarm, because n and m are too small;
    - "sentence": the result in words.
    """
    n = len(train_distances)
    m = len(stranger_distances)
    ranks = sorted({1, math.ceil(m / 100)})
    tests = [copy_test(train_distances, stranger_distances, k, len(ranks)) for k in ranks]
    p = min(test["p"] for test in tests)
    rings = p <= FALSE_ALARMS
    reported = tests[-1]
    if rings:
        reported = min(tests, key=lambda test: test["p"])
    facts = reported | {
        "units": n,
        "strangers": m,
        "rings": rings,
        "p": p,
        "epsilon": max(test["epsilon"] for test in tests),
        "unseen": undetected(n, m, len(ranks)),
    }
    return facts | {"sentence": copying_sentence(facts, unit)}


def copy_test(
    train_distances: np.ndarray, stranger_distances: np.ndarray, k: int, tests: int
) -> dict:
    """Run one of the tests of `compare_nearness`, for one k.

    The prior odds that a unit is a training unit are about n to m. If the release is ε-private, the
    odds that one of the nearest units is a training unit are at most e^ε times the prior odds.
    Clopper–Pearson limits for both odds give a lower bound on ε.

    train_distances, stranger_distances: see `compare_nearness`; tests: number of tests made.

    Returns the entries "near", "chance", "rank", "p" and "epsilon" that `compare_nearness`
    describes, for this test only.
    """
    n = len(train_distances)
    m = len(stranger_distances)
    count = int((train_distances < np.sort(stranger_distances)[k - 1]).sum())
    bound = 0.0
    if count:
        odds = logit(beta.ppf(MISSED / tests, count, k)) - logit(beta.ppf(1 - MISSED, n + 1, m))
        bound = max(bound, float(odds))
    return {
        "near": count,
        "chance": n * k / (m + 1),
        "rank": k,
        "p": copying_p_value(count, k, n, m, tests),
        "epsilon": bound,
    }


def copying_p_value(count: int, k: int, n: int, m: int, tests: int) -> float:
    """Compute the p-value if `count` of n training units are nearer than the k-th of m strangers.

    Training units and strangers are ranked together by distance. At least x training units are
    nearer than the k-th stranger if and only if the first x + k − 1 units contain fewer than k
    strangers. If nothing was copied, the number of strangers among these first units is
    hypergeometric. The p-value is multiplied by `tests`, the number of tests made.
    """
    return min(1.0, tests * float(hypergeom.cdf(k - 1, n + m, m, count + k - 1)))


def undetected(n: int, m: int, tests: int) -> int:
    """Compute the largest number of copies that could remain undetected, at most n.

    Copies are assumed to be nearer than all strangers. The p-value for k = 1 then falls with the
    number of copies.
    """

    def detected(copies: int) -> bool:
        return copying_p_value(copies, 1, n, m, tests) <= FALSE_ALARMS

    return bisect_left(range(n + 1), True, key=detected) - 1


def copying_sentence(facts: Mapping[str, Any], unit: str) -> str:
    """Describe `facts`, the result of `compare_nearness`. unit: "images" or "persons"."""
    unseen = facts["unseen"]
    outcome = (
        f"no sign of copying. Up to {grouped(unseen)} copies could remain undetected; a larger "
        "hold-out would lower this number"
    )
    if unseen == facts["units"]:
        outcome = (
            "none. This test cannot give an alarm, because the hold-out is too small. Hold out "
            f"more {unit} in the next release (test/, or data.holdout_fraction)"
        )
    if facts["rings"]:
        outcome = (
            "A SIGN OF COPYING. Look at neighbours.png, and do not share the release until you "
            "have found the cause"
        )
    share = f"99 % of the hold-out {unit}"
    if facts["rank"] <= 1:
        share = f"any of the {grouped(facts['strangers'])} hold-out {unit}"
    observation = (
        f"Of {grouped(facts['units'])} {unit} used for training, {grouped(facts['near'])} are "
        f"nearer to the release than {share}"
    )
    return (
        f"{observation}; {facts['chance']:.0f} would be expected by chance (p = "
        f"{facts['p']:.2g}). The measured ε is at least {facts['epsilon']:.2g}. Result: {outcome}."
    )
