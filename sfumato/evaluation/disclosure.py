"""Does a release come nearer to its training images than to strangers? A test with a number. All of it is local.

The hold-out plays the strangers. If the release was made without either, any order of all by their distance to it is as
likely as any other. So the count has a known law at any size, although the strangers' quantile is estimated. Equal
distances count for innocence. The hold-out must be drawn by chance: an official test split may differ by itself.
Sources: Amin et al. 2026 (arXiv 2606.16952); Steinke et al. 2023, for the bound on ε from one run.
"""

import math

import numpy as np
from scipy.special import logit
from scipy.stats import beta, hypergeom

from sfumato.data.images import ImageSet
from sfumato.data.lineage import digests
from sfumato.evaluation.extractors import Extractor, features_of
from sfumato.evaluation.metrics.neighbours import nearest
from sfumato.release.report import grouped

FALSE_ALARMS = 0.001  # how often the test rings, at most, if nothing was copied
MISSED = 0.025  # how often either part of the bound on ε fails, at most
MOST = 60_000  # images of each set
ONLY_PUBLIC = "not tested, because the released images are public ones: none is made of a training image."


def disclosure(generated: ImageSet | None, train: ImageSet, holdout: ImageSet, extractor: Extractor) -> dict:
    """What `compare_nearness` returns. generated: the released images that are not public; None if there are none.

    All images of a person are one unit, as near as the nearest; so are equal images. Of each set, MOST are looked at.
    """
    if generated is None:
        return {"sentence": ONLY_PUBLIC}
    random = np.random.default_rng(0)
    released = features_of(extractor, generated.images[random.permutation(len(generated))[:MOST]])
    nearness = []
    for real in (train, holdout):
        names = np.array([*digests(real.images)]) if real.groups is None else real.groups
        _, units = np.unique(names, return_inverse=True)
        drawn = random.permutation(units.max() + 1) < (units.max() + 1) * min(1.0, MOST / len(real))
        rows = np.flatnonzero(drawn[units])
        least = np.full(len(drawn), np.inf)
        np.minimum.at(least, units[rows], nearest(features_of(extractor, real.images[rows]), released)[1])
        nearness.append(least[drawn])
    return compare_nearness(nearness[0], nearness[1], "images" if train.groups is None else "persons")


def compare_nearness(near: np.ndarray, strangers: np.ndarray, unit: str) -> dict:
    """How many training units come nearer to the release than the k-th stranger, for k = 1 and k = m/100.

    near: (n,) distances of training units; strangers: (m,). At least x are nearer if and only if fewer than k of the
    x + k − 1 nearest of all are strangers: hypergeometric without copies, and under ε each of these is a training unit
    with at most e^ε times the odds of any (Clopper–Pearson). "p" is the smaller one, doubled for two tests.
    Returns {"near", "chance": the number to expect, "rank": k, "p"} of the test that rings, or else of k = m/100, and
    "units", "strangers", "rings", "epsilon": the bound, 95 %, "unseen": the most copies that may not ring, "sentence".
    """
    n, m = len(near), len(strangers)
    ranks = sorted({1, math.ceil(m / 100)})
    tests: list[dict] = []
    bounds = [0.0]
    for k in ranks:
        count = int((near < np.sort(strangers)[k - 1]).sum())
        p = min(1.0, len(ranks) * float(hypergeom.cdf(k - 1, n + m, m, count + k - 1)))
        tests.append({"near": count, "chance": n * k / (m + 1), "rank": k, "p": p})
        if count:
            odds = logit(beta.ppf(MISSED / len(ranks), count, k)) - logit(beta.ppf(1 - MISSED, n + 1, m))
            bounds.append(float(odds))
    least = min(tests, key=lambda test: test["p"])
    rings = least["p"] <= FALSE_ALARMS
    unseen = math.ceil(math.log(FALSE_ALARMS / len(ranks)) / math.log(n / (n + m))) - 1
    found = least if rings else tests[-1] | {"p": least["p"]}
    share = "one in a hundred strangers does" if found["rank"] > 1 else f"any of {grouped(m)} strangers does"
    outcome = f"no sign of copying. Up to {grouped(unseen)} copies may pass unseen, fewer with a larger hold-out"
    if rings:
        outcome = "A SIGN OF COPYING. Look at neighbours.png, and do not share the release before you know why"
    seen = f"{grouped(found['near'])} of {grouped(n)} {unit} came nearer than {share}"
    numbers = f"where chance gives {found['chance']:.0f} (p = {found['p']:.2g}, ε ≥ {max(bounds):.2g})"
    about = {"units": n, "strangers": m, "rings": rings, "epsilon": max(bounds), "unseen": unseen}
    return found | about | {"sentence": f"{seen}, {numbers}: {outcome}."}
