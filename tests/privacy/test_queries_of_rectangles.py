"""Adding or removing one image of 24×32 pixels changes the sum of a query by at most its bound,
before noise.
"""

import functools

import pytest
import torch
from cases import CASES as OF_SQUARES
from cases import (
    GRADIENTS,
    MAPS,
    VOTES,
    Case,
    central,
    finetune,
    means,
    modes,
    saliency,
    teacher,
    unet,
    unit_rows,
)
from parts import of_baselines

from sfumato.features.fourier import FourierFeatures
from sfumato.features.public_network import build_network
from sfumato.queries.feature_means import cosine_moments, moment_features
from sfumato.queries.histogram import query_histogram
from sfumato.settings.queries import FeatureMap
from sfumato.settings.stages import QUERIES

SHAPE = (1, 24, 32)
torch.manual_seed(0)
NETWORK = build_network("whitened", SHAPE, 20, 8).eval()
NETWORK.whiten(torch.rand(40, *SHAPE))
FEATURES = FourierFeatures(SHAPE, [FeatureMap(map=name) for name in MAPS], 120, seed=0)
BLOCKS = FourierFeatures(
    SHAPE, [FeatureMap(block=4), FeatureMap(map="moduli", block=2)], 80, seed=0
)
MOMENTS = moment_features(NETWORK)
of_rectangles = functools.partial(central, shape=SHAPE)
OF_RECTANGLES = {
    "mean": Case(
        stage="central",
        query=functools.partial(of_rectangles, max_norm=3.0),
        bound=3,
        uses=2,
        axis=0,
    ),
    "mean, unclipped": Case(stage="central", query=of_rectangles, bound=768**0.5, uses=2, axis=0),
    "mode": Case(stage="central", bound=768**0.5, **modes(shape=SHAPE)),
    "frequency": Case(stage="frequency", query=means(FEATURES), bound=1, axis=1),
    "frequency of blocks": Case(stage="frequency", query=means(BLOCKS), bound=1, axis=1),
    "covariance": Case(
        stage="covariance", query=means(cosine_moments(SHAPE, flip=False)), bound=1, axis=1
    ),
    "moments": Case(
        stage="moments", query=means(MOMENTS, cached=True), encode=MOMENTS.vectors, bound=1, axis=1
    ),
    "embedding": Case(
        stage="embedding", query=means(BLOCKS, cached=True), encode=BLOCKS.vectors, bound=1, axis=1
    ),
    "histogram": Case(stage="histogram", query=lambda c: query_histogram(c, NETWORK, 2), **VOTES),
    "teacher": Case(stage="teacher", query=teacher, encode=unit_rows, bound=1.4142, uses=3),
    "saliency": Case(
        stage="saliency", query=lambda c: saliency(c, model=unet(resolution=SHAPE[1:])), **GRADIENTS
    ),
    "finetune": Case(
        stage="finetune", query=lambda c: finetune(c, 1, unet(resolution=SHAPE[1:])), **GRADIENTS
    ),
    **of_baselines("baseline_cases", "OF_RECTANGLES"),
}

OWN = {case.stage for case in OF_RECTANGLES.values()}
# a query whose case does not depend on the shape uses the case of squares
CASES = OF_RECTANGLES | {name: case for name, case in OF_SQUARES.items() if case.stage not in OWN}


def test_every_query_has_a_case():
    assert {case.stage for case in CASES.values()} == {*QUERIES}


@pytest.mark.parametrize("name", CASES)
def test_one_rectangle_moves_the_total_by_at_most_the_bound(name, digits):
    images, labels = digits.batch(range(8))
    images = images.repeat_interleave(3, 2).repeat_interleave(4, 3)
    images[-1] = 1.0
    case = CASES[name]
    move = max(case.moves(images, labels, [0, 7]))
    assert 0.5 * case.bound <= move <= case.bound * (1 + case.rounding)
