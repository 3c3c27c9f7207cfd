import numpy as np
import pytest
import torch

from sfumato.data.images import ImageSet, load_images, save_images
from sfumato.errors import DataError
from sfumato.features.public_network import WhitenedCNN
from sfumato.settings.training import Classifier
from sfumato.training import supervised
from sfumato.training.public_classifier import shuffled, train_public_classifier
from sfumato.training.supervised import SHIFT, shift_and_mirror

SETTINGS = Classifier(width=8, steps=120)


def test_digits_are_learnt_and_scored_on_unseen_images(digits):
    model, accuracy = train_public_classifier(digits, SETTINGS, seed=0)
    assert not model.training and model.classes == 10
    assert accuracy > 0.85
    scrambled = ImageSet(
        digits.images, np.random.default_rng(0).integers(0, 10, len(digits)), digits.classes
    )
    _, chance = train_public_classifier(
        scrambled, SETTINGS.model_copy(update={"steps": 60}), seed=0
    )
    assert chance < 0.25, (
        "labels that mean nothing were predicted: the validation images were trained on"
    )


def test_the_seed_fixes_the_network_only(digits):
    before = torch.get_rng_state()
    short = SETTINGS.model_copy(update={"steps": 3})
    (first, a), (second, b), (third, _) = (
        train_public_classifier(digits, short, seed) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), before)
    again = second.state_dict()
    assert a == b and all(
        torch.equal(value, again[name]) for name, value in first.state_dict().items()
    )
    assert not torch.equal(first.head.weight, third.head.weight)


class Watched(np.memmap):
    """A memory map that records the largest number of rows read at a time."""

    largest = 0

    def __getitem__(self, index):
        Watched.largest = max(Watched.largest, len(index))
        return np.asarray(self)[index]


def test_memory_mapped_images_are_read_batch_by_batch(digits, tmp_path):
    save_images(tmp_path, digits)
    mapped = load_images(tmp_path, digits.classes)
    watched = ImageSet(mapped.images.view(Watched), mapped.labels, mapped.classes)
    seen = []
    short = SETTINGS.model_copy(update={"steps": 2, "batch": 32})
    train_public_classifier(watched, short, 0, lambda *at: seen.append(at))
    assert 0 < Watched.largest <= 512
    assert seen == [(1, 2), (2, 2)]


@pytest.mark.parametrize(("side", "number"), [(8, 1890), (64, 1890), (128, 1250)])
def test_large_images_are_whitened_from_fewer(side, number, monkeypatch):
    shapes = []
    monkeypatch.setattr(WhitenedCNN, "whiten", lambda _, images: shapes.append(images.shape))
    blank = np.broadcast_to(np.uint8(0), (2100, side, side, 1))
    images = ImageSet(blank, np.arange(2100) % 2, ("a", "b"))
    settings = Classifier(width=1, steps=1, network="whitened")
    train_public_classifier(images, settings, seed=0)
    assert shapes == [(number, 1, side, side)]


def test_each_pass_shows_each_image_once_in_a_new_order():
    batches = shuffled(np.arange(100, 140), 10, np.random.default_rng(0))
    first, second = ([next(batches) for _ in range(4)] for _ in range(2))
    for passed in (first, second):
        assert sorted(np.concatenate(passed)) == list(range(100, 140))
        assert all((np.diff(batch) > 0).all() for batch in passed)
    assert not np.array_equal(first, second)
    assert len(next(shuffled(np.arange(3), 10, np.random.default_rng(0)))) == 3


def test_augmentation_shifts_and_mirrors_only_on_request():
    torch.manual_seed(0)
    images = torch.zeros(400, 1, 16, 16)
    images[:, 0, 8, 5] = 1.0
    for flip in (False, True):
        places = shift_and_mirror(images, flip)[:, 0].nonzero()
        assert len(places) == 400
        rows = places[:, 1]
        columns = places[:, 2]
        assert set(rows.tolist()) == set(range(8 - 16 // SHIFT, 8 + 16 // SHIFT + 1))
        near = set(range(5 - 16 // SHIFT, 5 + 16 // SHIFT + 1))
        assert set(columns.tolist()) == (near | {15 - place for place in near} if flip else near)
    flat = torch.full((20, 3, 8, 8), 0.7)  # edges are repeated, so a shift changes nothing
    assert torch.equal(shift_and_mirror(flat, mirror=True), flat)


def test_a_set_too_small_to_split_is_refused(digits):
    few = ImageSet(digits.images[:2], digits.labels[:2], digits.classes)
    with pytest.raises(DataError, match="number of images is 2"):
        train_public_classifier(few, SETTINGS, seed=0)


def test_large_images_come_in_smaller_batches_and_in_their_order():
    seen = []

    def brightness(images):
        seen.append(len(images))
        return images.mean(dim=(1, 2, 3))[:, None]

    images = np.arange(50, dtype=np.uint8)[:, None, None, None] * np.ones(
        (1, 512, 512, 1), np.uint8
    )
    found = supervised.apply(brightness, images, "cpu")
    assert max(seen) * 512**2 <= 1000 * 64**2 < (max(seen) + 1) * 512**2
    assert np.allclose(found[:, 0] * 255, np.arange(50), atol=1e-3)
