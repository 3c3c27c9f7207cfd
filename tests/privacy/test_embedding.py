"""The second embedding: features learned on what was released, and the guarantee of its one release."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from sfumato.data.images import ImageSet
from sfumato.data.store import load_latents, load_prepared
from sfumato.features.batch_invariant import place_matters, rows_alone
from sfumato.privacy.charge import Charge
from sfumato.privacy.events import Mechanism
from sfumato.privacy.rows import bounded_sum
from sfumato.queries.embedding import (
    embedding_rows,
    learned_features,
    load_learned,
    query_embedding,
    save_learned,
    study,
)
from sfumato.queries.encoded import encoder_of, ensure_encoded
from sfumato.queries.teacher import TeacherNetwork, fit_features
from sfumato.settings.queries import Embedding, Learned, Teacher

CLASSES, SHAPE = 10, (1, 8, 8)
SETTINGS = Embedding(size=200, learned=Learned(width=8, steps=60, dimension=24))


class Recorder:
    """A charge without noise, whose one use draws all rows."""

    uses, sum = 1, Charge.sum

    def __init__(self, rows, labels):
        self.rows, self.labels = rows, labels

    def batches(self, size):
        for start in range(0, len(self.rows), size):
            yield self.rows[start : start + size], self.labels[start : start + size]

    def release(self, total, max_norm, integer=False):
        assert max_norm == 1.0
        return total

    def blank(self):
        return self.rows.new_zeros(1, *self.rows.shape[1:]), torch.tensor([-1])


@pytest.fixture(scope="module")
def teacher(digits):
    """One that knows the digits: its weights are class means of its features."""
    features = fit_features(Teacher(feature="pixels", dimension=16), SHAPE, None, digits, seed=0)[0]
    images, labels = digits.batch(range(len(digits)))
    means = torch.stack([features(images[labels == label]).mean(0) for label in range(CLASSES)], dim=1)
    return TeacherNetwork.of(features, 20 * means.double())


@pytest.fixture(scope="module")
def network(digits, teacher):
    return study(SETTINGS.learned, digits, teacher, seed=0)


@pytest.fixture(scope="module")
def features(teacher, network):
    return learned_features(SETTINGS, teacher.features, network, seed=3)


def test_the_network_studies_the_labels_of_the_teacher_and_not_those_asked_for(digits, teacher):
    wrong = ImageSet(digits.images, np.random.default_rng(0).permutation(digits.labels), digits.classes)
    first, second = (study(SETTINGS.learned, images, teacher, seed=0).state_dict() for images in (digits, wrong))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_rows_have_norm_one_and_the_teacher_its_share(features, digits):
    images = digits.batch(range(30))[0]
    rows = features(images)
    assert rows.shape == (30, SETTINGS.size)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(30), rtol=0, atol=1e-5)
    torch.testing.assert_close(features.of_vectors(features.vectors(images).double()).float(), rows, atol=1e-4, rtol=0)
    half = features.amplitude.square()[: SETTINGS.size // 4].sum()
    assert half.item() == pytest.approx(SETTINGS.teacher)


def test_one_image_moves_the_release_by_at_most_one_and_no_other_image(features, digits):
    images, labels = digits.batch(range(70))
    matters = place_matters(features.vectors, SHAPE, torch.device("cpu"))
    vectors = rows_alone(features.vectors, images, matters)
    whole = bounded_sum(embedding_rows(features, CLASSES, vectors, labels), 1.0)
    for left_out in (0, 33, 69):
        kept = torch.arange(70) != left_out
        assert torch.equal(rows_alone(features.vectors, images[kept], matters), vectors[kept])
        rest = bounded_sum(embedding_rows(features, CLASSES, vectors[kept], labels[kept]), 1.0)
        assert 0.99 < (whole - rest).norm() <= 1 + 1e-9
    broken = torch.cat([vectors, torch.full_like(vectors[:1], float("nan"))]), torch.cat([labels, labels[:1]])
    assert torch.equal(bounded_sum(embedding_rows(features, CLASSES, *broken), 1.0), whole)


def test_the_release_is_divided_by_a_public_size_and_comes_back_from_disk(features, network, teacher, digits, tmp_path):
    images, labels = digits.batch(range(50))
    found = query_embedding(Recorder(features.vectors(images), labels), features, CLASSES, 400.0)
    weights = torch.nn.functional.one_hot(labels, CLASSES).float() / 400
    with torch.no_grad():
        torch.testing.assert_close(found, features.embed(images, weights), atol=1e-5, rtol=0)
    save_learned(found, SETTINGS, network, 3, tmp_path)
    release, rebuilt = load_learned(tmp_path, teacher.features)
    assert torch.equal(release, found) and torch.equal(rebuilt(images), features(images))


def test_what_the_maps_make_of_the_images_is_computed_once_journalled_and_drawn_in_their_place(
    owner, features, monkeypatch
):
    @contextmanager
    def bar():
        yield lambda done, of: None

    def ensure(about):
        encoder = encoder_of(features, about)
        return ensure_encoded(features.vectors, encoder, torch.device("cpu"), owner.state, owner.card, bar)

    before = len(owner.odometer.entries())
    key = ensure({"maps": 2})
    opened = owner.odometer.entries()
    with monkeypatch.context() as patched:
        patched.setattr("sfumato.queries.encoded.write_latents", None)
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
