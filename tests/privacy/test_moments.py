"""Moments of a public network's features: one image moves both parts by what they may, on a trained network."""

import math

import pytest
import torch
from cases import Recorder

from sfumato.features import FeatureMeans
from sfumato.features.batch_invariant import rows_alone
from sfumato.features.fourier import FourierFeatures
from sfumato.privacy.rows import bounded_sum
from sfumato.queries.feature_means import cached_rows, load_means, moment_features, query_feature_means, save_means
from sfumato.settings.queries import FeatureMap
from sfumato.settings.training import Classifier
from sfumato.training.public_classifier import train_public_classifier

CLASSES, SHAPE = 10, (1, 8, 8)


@pytest.fixture(scope="module")
def network(digits):
    return train_public_classifier(digits, Classifier(width=8, steps=60), seed=0)[0]


@pytest.fixture(scope="module")
def vectors(network, digits):
    features = moment_features(network)
    images, labels = digits.batch(range(60))
    return rows_alone(features.vectors, images, False), labels


@pytest.mark.parametrize("squares", [0.0, 0.3])
def test_each_part_has_the_norm_of_its_share(squares, network, vectors):
    features = moment_features(network, squares=squares)
    width = features.widths[0]
    rows = features.from_maps(vectors[0][:, : sum(features.widths)].double())
    assert features.size == rows.shape[1] == width * (2 if squares else 1)
    torch.testing.assert_close(rows[:, :width].norm(dim=1), torch.full((60,), math.sqrt(1 - squares)).double())
    torch.testing.assert_close(rows[:, width:].norm(dim=1), torch.full((60,), math.sqrt(squares)).double())
    squared = rows[:, :width].square()
    if squares:
        expected = math.sqrt(squares) * squared / squared.norm(dim=1, keepdim=True)
        torch.testing.assert_close(rows[:, width:], expected)


def test_one_image_moves_the_release_by_at_most_one_and_by_nearly_that(network, vectors):
    rows, labels = vectors
    features = moment_features(network)
    charge = Recorder(rows, labels)
    query_feature_means(charge, features, CLASSES, 60.0, cached=True)
    ((whole, max_norm, _),) = charge.asked
    assert max_norm == 1.0
    for left_out in range(0, 60, 7):
        kept = torch.arange(60) != left_out
        rest = bounded_sum(cached_rows(features, rows[kept], labels[kept], CLASSES), 1.0)
        assert 0.999 < float((whole - rest).norm()) <= 1 + 1e-9


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, 0.0])
def test_a_broken_or_empty_vector_moves_it_by_at_most_one(value, network):
    features = moment_features(network)
    broken = torch.full((1, sum(features.widths)), value)
    moved = bounded_sum(cached_rows(features, broken, torch.tensor([3]), CLASSES), 1.0)
    assert moved.isfinite().all() and moved.norm() <= 1 + 1e-12


def test_what_was_saved_gives_the_release_and_its_features_again(network, vectors, digits, tmp_path):
    features = moment_features(network, squares=0.25)
    released = query_feature_means(Recorder(*vectors), features, CLASSES, 60.0, cached=True)
    about = {"feature": "classifier", "squares": 0.25}
    save_means("moments", FeatureMeans(released, features), about, tmp_path, network)
    found = load_means("moments", tmp_path)
    target, again = found.table, found.features
    images, labels = digits.batch(range(20))
    assert torch.equal(target, released) and torch.equal(again(images), features(images))
    onehot = torch.nn.functional.one_hot(labels, CLASSES).float()
    torch.testing.assert_close(again.embed(images, onehot), again(images).T @ onehot, rtol=0, atol=1e-4)


def test_the_tangent_is_the_gradient_of_the_network(digits):
    from sfumato.features.tangent import Tangent

    tangent, images = Tangent(SHAPE), digits.batch(range(5))[0]

    def network(inner, outer, x):
        return torch.nn.functional.silu(x.flatten() @ inner) @ outer

    gradient = torch.func.vmap(torch.func.grad(network, argnums=(0, 1)), in_dims=(None, None, 0))
    by_inner, by_outer = gradient(tangent.inner, tangent.outer, images)
    expected = torch.cat([by_inner.transpose(1, 2).flatten(1), by_outer], dim=1)
    rows = tangent(images)
    assert rows.norm(dim=1).tolist() == pytest.approx([math.sqrt(rows.shape[1])] * 5, rel=1e-4)
    torch.testing.assert_close(
        rows, expected * (math.sqrt(rows.shape[1]) / expected.norm(dim=1, keepdim=True)), rtol=1e-3, atol=1e-3
    )


def test_the_inner_product_is_the_rational_quadratic_kernel(digits):
    """Within 5 standard errors of a mean of K/2 cosines; false alarm over 144 pairs under 1e-4."""
    images, _ = digits.batch(range(12))
    wide = FeatureMap(kernel="rational-quadratic", length_scales=(0.366,))
    rows = FourierFeatures(SHAPE, [wide], 20_000, seed=0)(images)
    squared = torch.cdist(images.flatten(1), images.flatten(1)).square()
    kernel = 1 / (1 + squared / (2 * 0.366**2 * 64))
    assert (rows @ rows.T - kernel).abs().max() < 5 * math.sqrt(0.5 / 10_000)


def test_maps_with_and_without_frequencies_stand_side_by_side(digits):
    parts = [FeatureMap(weight=3.0), FeatureMap(map="tangent", kernel="linear")]
    features = FourierFeatures(SHAPE, parts, 100, seed=0)
    rows = features(digits.batch(range(9))[0])
    assert features.size == rows.shape[1] == 100 + 16 * 65
    torch.testing.assert_close(rows[:, :100].square().sum(1), torch.full((9,), 0.75), rtol=1e-4, atol=0)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(9), rtol=1e-4, atol=0)
