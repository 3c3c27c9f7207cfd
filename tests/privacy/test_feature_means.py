"""Mean features of a public network (moments), and of one that learned from releases (the second
embedding).

On trained networks, one image moves the release by at most one, and changes no other image's part.
"""

import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import CLASSES, SHAPE, Recorder, classifier

from sfumato.data.images import ImageSet
from sfumato.data.store import load_latents, load_prepared
from sfumato.features import FeatureMeans
from sfumato.features.batch_invariant import place_matters, rows_alone
from sfumato.features.fourier import FourierFeatures
from sfumato.features.tangent import Tangent
from sfumato.features.teacher_network import TeacherNetwork, fit_features
from sfumato.privacy.authorize import ensure_latents
from sfumato.privacy.events import Mechanism
from sfumato.privacy.rows import Rows, bounded_sum, label_rows
from sfumato.queries.feature_means import (
    LENGTH_SCALES,
    TEACHER,
    encoder_of,
    encoding_alone,
    learned_features,
    load_means,
    moment_features,
    query_feature_means,
    save_means,
    train_feature_network,
)
from sfumato.settings.queries import FeatureMap, Teacher

SIZE = 200
STEPS = 30


@pytest.fixture(scope="module")
def teacher(digits):
    """Return a teacher of the digits, with class means of its features as weights."""
    features = fit_features(Teacher(feature="pixels", dimension=16), SHAPE, None, digits, seed=0)[0]
    images, labels = digits.batch(range(len(digits)))
    means = torch.stack(
        [features(images[labels == label]).mean(0) for label in range(CLASSES)], dim=1
    )
    return TeacherNetwork.of(features, 20 * means.double())


@pytest.fixture(scope="module")
def network(digits, teacher):
    return train_feature_network(digits, teacher, STEPS, 0, print)


@pytest.fixture(scope="module")
def learned(teacher, network):
    return learned_features(teacher.features, network, SIZE, seed=3)


@pytest.fixture(scope="module", params=["embedding", "moments"])
def features(request, learned):
    return learned if request.param == "embedding" else moment_features(classifier())


def test_the_network_learns_the_teachers_labels(digits, teacher):
    wrong = ImageSet(
        digits.images, np.random.default_rng(0).permutation(digits.labels), digits.classes
    )
    first, second = (
        train_feature_network(images, teacher, STEPS, 0, print).state_dict()
        for images in (digits, wrong)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_rows_have_norm_one_and_the_teacher_its_share(learned, digits):
    images = digits.batch(range(30))[0]
    rows = learned(images)
    assert rows.shape == (30, SIZE)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(30), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        learned.from_maps(learned.vectors(images).double()).float(), rows, atol=1e-4, rtol=0
    )
    half = learned.amplitude.square()[: SIZE // 4].sum()
    assert half.item() == pytest.approx(TEACHER)


@pytest.mark.parametrize("squares", [0.0, 0.3])
def test_each_part_of_the_moments_has_the_norm_of_its_share(squares, digits):
    features = moment_features(classifier(), squares=squares)
    width = features.widths[0]
    vectors = rows_alone(features.vectors, digits.batch(range(60))[0], False)
    rows = features.from_maps(vectors[:, : sum(features.widths)].double())
    assert features.size == rows.shape[1] == width * (2 if squares else 1)
    torch.testing.assert_close(
        rows[:, :width].norm(dim=1), torch.full((60,), math.sqrt(1 - squares)).double()
    )
    torch.testing.assert_close(
        rows[:, width:].norm(dim=1), torch.full((60,), math.sqrt(squares)).double()
    )
    squared = rows[:, :width].square()
    if squares:
        expected = math.sqrt(squares) * squared / squared.norm(dim=1, keepdim=True)
        torch.testing.assert_close(rows[:, width:], expected)


def cached_rows(features, vectors, labels):
    return Rows(features.from_maps(vectors.double()), label_rows(labels, CLASSES))


def test_one_image_moves_the_release_by_at_most_one(features, digits):
    images, labels = digits.batch(range(70))
    matters = place_matters(features.vectors, SHAPE, torch.device("cpu"))
    vectors = rows_alone(features.vectors, images, matters)
    charge = Recorder(vectors, labels)
    query_feature_means(charge, features, CLASSES, 70.0, cached=True)
    ((whole, max_norm, _),) = charge.asked
    assert max_norm == 1.0
    for left_out in range(0, 70, 7):
        kept = torch.arange(70) != left_out
        assert torch.equal(rows_alone(features.vectors, images[kept], matters), vectors[kept])
        rest = bounded_sum(cached_rows(features, vectors[kept], labels[kept]), 1.0)
        assert 0.99 < (whole - rest).norm() <= 1 + 1e-9
    for value in (float("nan"), float("inf"), 1e30, 0.0):  # broken or empty
        moved = bounded_sum(
            cached_rows(features, torch.full_like(vectors[:1], value), labels[:1]), 1.0
        )
        assert moved.isfinite().all() and moved.norm() <= math.isfinite(value) + 1e-12


@pytest.mark.parametrize("stage", ["embedding", "moments"])
def test_the_release_is_divided_by_a_public_size(
    stage, learned, network, teacher, digits, tmp_path
):
    squares = {"squares": 0.25}
    features, network, about = {
        "embedding": (
            learned,
            network,
            {"seed": 3, "size": SIZE, "length_scales": LENGTH_SCALES, "teacher": TEACHER},
        ),
        "moments": (
            moment_features(classifier(), **squares),
            classifier(),
            {"feature": "classifier", **squares},
        ),
    }[stage]
    images, labels = digits.batch(range(50))
    found = query_feature_means(
        Recorder(features.vectors(images), labels), features, CLASSES, 400.0, cached=True
    )
    weights = torch.nn.functional.one_hot(labels, CLASSES).float() / 400
    with torch.no_grad():
        torch.testing.assert_close(found, features.embed(images, weights), atol=1e-5, rtol=0)
    save_means(stage, FeatureMeans(found, features), about, tmp_path, network)
    plan = SimpleNamespace(shape=digits.shape, classes=range(CLASSES), several=False)
    again = load_means(stage, tmp_path, teacher.features, plan=plan)
    assert torch.equal(again.table, found) and torch.equal(again.features(images), features(images))


def test_features_are_computed_once_and_drawn_as_images(owner, learned, monkeypatch):
    bar = partial(nullcontext, lambda done, of: None)

    def ensure(about):
        encoder = encoder_of(learned, about)
        load = partial(encoding_alone, learned.vectors, owner.card.shape, torch.device("cpu"))
        return ensure_latents(owner.state, owner.card, encoder, "features", load, bar)

    before = len(owner.odometer.entries())
    key = ensure({"maps": 2})
    opened = owner.odometer.entries()
    with monkeypatch.context() as patched:
        patched.setattr("sfumato.privacy.authorize.write_latents", None)
        assert ensure({"maps": 2}) == key
    assert owner.odometer.entries() == opened and len(opened) == before + 1
    images = load_prepared(owner.state, owner.card, "sensitive")
    kept = load_latents(owner.state, owner.card, key)
    assert len(kept) == len(images) and np.array_equal(kept.labels, images.labels)
    row = rows_alone(learned.vectors, images.batch(np.array([17]))[0])
    # Kernels of another batch size may round a value to its neighbour
    half = torch.finfo(torch.float16).eps
    torch.testing.assert_close(kept.batch(np.array([17]))[0], row, rtol=4 * half, atol=4 * half)
    charge = owner.open(Mechanism(noise_multiplier=2.0, sample_rate=0.2), latents=key)
    drawn = torch.cat([rows for rows, _ in charge.batches(size=512)])
    assert drawn.shape[1] == sum(learned.widths) and 0 < len(drawn) < len(images)
    assert ensure({"maps": 3}) != key


def test_the_tangent_is_the_gradient_of_the_network(digits):
    tangent = Tangent(SHAPE)
    images = digits.batch(range(5))[0]

    def network(inner, outer, x):
        return torch.nn.functional.silu(x.flatten() @ inner) @ outer

    gradient = torch.func.vmap(torch.func.grad(network, argnums=(0, 1)), in_dims=(None, None, 0))
    by_inner, by_outer = gradient(tangent.inner, tangent.outer, images)
    expected = torch.cat([by_inner.transpose(1, 2).flatten(1), by_outer], dim=1)
    rows = tangent(images)
    assert rows.norm(dim=1).tolist() == pytest.approx([math.sqrt(rows.shape[1])] * 5, rel=1e-4)
    expected *= math.sqrt(rows.shape[1]) / expected.norm(dim=1, keepdim=True)
    torch.testing.assert_close(rows, expected, rtol=1e-3, atol=1e-3)


def test_maps_with_and_without_frequencies_stand_side_by_side(digits):
    parts = [FeatureMap(weight=3.0), FeatureMap(map="tangent", kernel="linear")]
    features = FourierFeatures(SHAPE, parts, 100, seed=0)
    rows = features(digits.batch(range(9))[0])
    assert features.size == rows.shape[1] == 100 + 16 * 65
    torch.testing.assert_close(
        rows[:, :100].square().sum(1), torch.full((9,), 0.75), rtol=1e-4, atol=0
    )
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(9), rtol=1e-4, atol=0)
