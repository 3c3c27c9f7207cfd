"""The second embedding: features learned on what was released, and the guarantee of its one release."""

from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from cases import Recorder

from sfumato.data.images import ImageSet
from sfumato.data.store import load_latents, load_prepared
from sfumato.features import FeatureMeans
from sfumato.features.batch_invariant import place_matters, rows_alone
from sfumato.features.teacher_network import TeacherNetwork, fit_features
from sfumato.privacy.events import Mechanism
from sfumato.privacy.latents import ensure_latents
from sfumato.privacy.rows import bounded_sum
from sfumato.queries.feature_means import (
    LENGTH_SCALES,
    TEACHER,
    cached_rows,
    encoder_of,
    encoding_alone,
    learned_features,
    load_means,
    query_feature_means,
    save_means,
    train_feature_network,
)
from sfumato.settings.queries import Teacher

CLASSES, SHAPE = 10, (1, 8, 8)
SIZE, STEPS = 200, 30


@pytest.fixture(scope="module")
def teacher(digits):
    """One that knows the digits: its weights are class means of its features."""
    features = fit_features(Teacher(feature="pixels", dimension=16), SHAPE, None, digits, seed=0)[0]
    images, labels = digits.batch(range(len(digits)))
    means = torch.stack([features(images[labels == label]).mean(0) for label in range(CLASSES)], dim=1)
    return TeacherNetwork.of(features, 20 * means.double())


@pytest.fixture(scope="module")
def network(digits, teacher):
    return train_feature_network(digits, teacher, STEPS, 0, print)


@pytest.fixture(scope="module")
def features(teacher, network):
    return learned_features(teacher.features, network, SIZE, seed=3)


def test_the_network_studies_the_labels_of_the_teacher_and_not_those_asked_for(digits, teacher):
    wrong = ImageSet(digits.images, np.random.default_rng(0).permutation(digits.labels), digits.classes)
    first, second = (train_feature_network(images, teacher, STEPS, 0, print).state_dict() for images in (digits, wrong))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_rows_have_norm_one_and_the_teacher_its_share(features, digits):
    images = digits.batch(range(30))[0]
    rows = features(images)
    assert rows.shape == (30, SIZE)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(30), rtol=0, atol=1e-5)
    torch.testing.assert_close(features.from_maps(features.vectors(images).double()).float(), rows, atol=1e-4, rtol=0)
    half = features.amplitude.square()[: SIZE // 4].sum()
    assert half.item() == pytest.approx(TEACHER)


def test_one_image_moves_the_release_by_at_most_one_and_no_other_image(features, digits):
    images, labels = digits.batch(range(70))
    matters = place_matters(features.vectors, SHAPE, torch.device("cpu"))
    vectors = rows_alone(features.vectors, images, matters)
    whole = bounded_sum(cached_rows(features, vectors, labels, CLASSES), 1.0)
    for left_out in (0, 33, 69):
        kept = torch.arange(70) != left_out
        assert torch.equal(rows_alone(features.vectors, images[kept], matters), vectors[kept])
        rest = bounded_sum(cached_rows(features, vectors[kept], labels[kept], CLASSES), 1.0)
        assert 0.99 < (whole - rest).norm() <= 1 + 1e-9
    broken = torch.cat([vectors, torch.full_like(vectors[:1], float("nan"))]), torch.cat([labels, labels[:1]])
    assert torch.equal(bounded_sum(cached_rows(features, *broken, CLASSES), 1.0), whole)


def test_the_release_is_divided_by_a_public_size_and_comes_back_from_disk(features, network, teacher, digits, tmp_path):
    images, labels = digits.batch(range(50))
    found = query_feature_means(Recorder(features.vectors(images), labels), features, CLASSES, 400.0, cached=True)
    weights = torch.nn.functional.one_hot(labels, CLASSES).float() / 400
    with torch.no_grad():
        torch.testing.assert_close(found, features.embed(images, weights), atol=1e-5, rtol=0)
    about = {"seed": 3, "size": SIZE, "length_scales": LENGTH_SCALES, "teacher": TEACHER}
    save_means("embedding", FeatureMeans(found, features), about, tmp_path, network)
    again = load_means("embedding", tmp_path, teacher.features)
    assert torch.equal(again.table, found) and torch.equal(again.features(images), features(images))


def test_what_the_maps_make_of_the_images_is_computed_once_journalled_and_drawn_in_their_place(
    owner, features, monkeypatch
):
    @contextmanager
    def bar():
        yield lambda done, of: None

    def ensure(about):
        encoder = encoder_of(features, about)
        load = partial(encoding_alone, features.vectors, owner.card.shape, torch.device("cpu"))
        return ensure_latents(owner.state, owner.card, encoder, "features", load, bar)

    before = len(owner.odometer.entries())
    key = ensure({"maps": 2})
    opened = owner.odometer.entries()
    with monkeypatch.context() as patched:
        patched.setattr("sfumato.privacy.latents.write_latents", None)
        assert ensure({"maps": 2}) == key
    assert owner.odometer.entries() == opened and len(opened) == before + 1
    images = load_prepared(owner.state, owner.card, "sensitive")
    kept = load_latents(owner.state, owner.card, key)
    assert len(kept) == len(images) and np.array_equal(kept.labels, images.labels)
    row = rows_alone(features.vectors, images.batch(np.array([17]))[0])
    half = torch.finfo(torch.float16).eps  # kernels of another batch size may round a value to its neighbour
    torch.testing.assert_close(kept.batch(np.array([17]))[0], row, rtol=4 * half, atol=4 * half)
    charge = owner.open(Mechanism(noise_multiplier=2.0, sample_rate=0.2), latents=key)
    drawn = torch.cat([rows for rows, _ in charge.batches(size=512)])
    assert drawn.shape[1] == sum(features.widths) and 0 < len(drawn) < len(images)
    assert ensure({"maps": 3}) != key
