"""Test whether a release is nearer to its training images than to strangers. All of it is local.

Strangers are hold-out images. If the release treats training images and strangers alike, all orders
of their distances to it are equally likely. So the number of training images nearer than the k-th
stranger has a known distribution, although the strangers' quantile is estimated. A tie counts as no
copy.

Source: Amin et al. 2026 (arXiv 2606.16952); Steinke et al. 2023, for the bound on ε from one run.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import logit
from scipy.stats import beta, hypergeom

from sfumato.data.images import ImageSet
from sfumato.data.lineage import digests
from sfumato.evaluation.extractors import Extractor
from sfumato.evaluation.metrics.neighbours import nearest_rows
from sfumato.features.teacher_network import classify
from sfumato.release.report import grouped

FALSE_ALARMS = 0.001  # Largest rate of alarms if nothing was copied
MISSED = 0.025  # Largest rate at which either part of the bound on ε fails
MOST_RELEASED = 60_000  # Largest number of released images to compare
# Largest number of images of each real set. More images take minutes longer and detect no larger
# share of copies.
MOST_REAL = 20_000


def disclosure(
    generated: ImageSet | None,
    train: ImageSet,
    holdout: ImageSet,
    extractor: Extractor,
    more: np.ndarray | None = None,
) -> dict:
    """Run `compare_nearness` on images and return its result.

    All images of a person, and all equal images, form one unit, at the distance of its nearest
    image. A large set is sampled at random. generated: released images except public ones, or None;
    more: (n, H, W, C) uint8, further images drawn from the same networks, as recipients may draw
    them.
    """
    if generated is None:
        return {
            "sentence": (
                "not tested, because the released images are public: none is made of a training "
                "image."
            )
        }
    random = np.random.default_rng(0)
    released = extractor(generated.images[random.permutation(len(generated))[:MOST_RELEASED]])
    if more is not None:
        released = np.concatenate([released, extractor(more)])
    return compare_sets(
        lambda real: nearest_rows(extractor(real.images), released)[1], train, holdout, random
    )


def membership(network: Any, train: ImageSet, holdout: ImageSet) -> dict:
    """Run `compare_nearness` on the losses of a network: a low loss counts as near.

    network: network for `probabilities_of`.
    """

    def losses(real: ImageSet) -> np.ndarray:
        shares = classify(network, real).double().clamp(1e-12, 1 - 1e-12).numpy()
        if real.labels.ndim == 1:
            return -np.log(shares[np.arange(len(shares)), real.labels])
        return -np.log(np.where(real.labels > 0, shares, 1 - shares)).sum(axis=1)

    return compare_sets(losses, train, holdout, np.random.default_rng(0))


def compare_sets(
    nearness_of: Callable[[ImageSet], np.ndarray],
    train: ImageSet,
    holdout: ImageSet,
    random: np.random.Generator,
) -> dict:
    """Run `compare_nearness` on the units of both sets.

    nearness_of: function from n images to (n,) numbers, smaller for nearer images.
    """
    nearness = []
    for real in (train, holdout):
        names = np.array([*digests(real.images)]) if real.groups is None else real.groups
        units = np.unique(names, return_inverse=True)[1]
        drawn = random.permutation(units.max() + 1) < (units.max() + 1) * min(
            1.0, MOST_REAL / len(real)
        )
        rows = np.flatnonzero(drawn[units])
        least = np.full(len(drawn), np.inf)
        np.minimum.at(least, units[rows], nearness_of(real.take(rows)))
        nearness.append(least[drawn])
    return compare_nearness(
        nearness[0], nearness[1], "images" if train.groups is None else "persons"
    )


def compare_nearness(near: np.ndarray, strangers: np.ndarray, unit: str) -> dict:
    """Count the (n,) training units nearer to the release than the k-th of (m,) strangers.

    It tests k = 1 and k = m/100. At least x training units are nearer if and only if fewer than k
    of the x + k − 1 nearest units are strangers. Their number is hypergeometric. Under ε, each of
    these units is a training unit with at most e^ε times the odds of any other (Clopper–Pearson).
    "p" is doubled, because there are two tests. Returns {"near", "chance": the expected number,
    "rank": k, "p"} of the k that gives an alarm, or of m/100, and "units", "strangers", "rings":
    whether there is an alarm, "epsilon": the 95 % bound, "unseen": the most copies without an
    alarm, "sentence".
    """
    n = len(near)
    m = len(strangers)
    ranks = sorted({1, math.ceil(m / 100)})
    tests: list[dict] = []
    for k in ranks:
        count = int((near < np.sort(strangers)[k - 1]).sum())
        p = min(1.0, len(ranks) * float(hypergeom.cdf(k - 1, n + m, m, count + k - 1)))
        odds = logit(beta.ppf(MISSED / len(ranks), max(count, 1), k)) - logit(
            beta.ppf(1 - MISSED, n + 1, m)
        )
        bound = max(0.0, float(odds)) if count else 0.0
        tests.append(
            {"near": count, "chance": n * k / (m + 1), "rank": k, "p": p, "epsilon": bound}
        )
    p = min(test["p"] for test in tests)
    epsilon = max(test["epsilon"] for test in tests)
    rings = p <= FALSE_ALARMS
    unseen = math.ceil(math.log(FALSE_ALARMS / len(ranks)) / math.log(n / (n + m))) - 1
    reported = tests[-1]
    outcome = (
        f"no sign of copying. Up to {grouped(unseen)} copies could go undetected; a larger "
        "hold-out detects more"
    )
    if rings:
        reported = min(tests, key=lambda test: test["p"])
        outcome = (
            "A SIGN OF COPYING. Look at neighbours.png, and do not share the release before the "
            "cause is found"
        )
    share = (
        "the nearest 1 % of strangers" if reported["rank"] > 1 else f"all of {grouped(m)} strangers"
    )
    seen = f"{grouped(reported['near'])} of {grouped(n)} {unit} are nearer than {share}"
    sentence = (
        f"{seen}; {reported['chance']:.0f} are expected by chance (p = {p:.2g}, "
        f"ε ≥ {epsilon:.2g}): {outcome}."
    )
    about = {
        "units": n,
        "strangers": m,
        "rings": rings,
        "p": p,
        "epsilon": epsilon,
        "unseen": unseen,
    }
    return reported | about | {"sentence": sentence}
