"""Choose the hold-out images by which a release may be judged."""

import io

import numpy as np
import pytest
from PIL import Image

from sfumato.data.images import ImageSet
from sfumato.data.rendered import drawn_set
from sfumato.evaluation.disclosure import compare_sets
from sfumato.evaluation.holdout import (
    LOOK_ALIKES,
    lost_classes,
    unusable,
    without_copies,
    without_repeats,
)


def resized(images: np.ndarray, side: int) -> np.ndarray:
    """Save the images as JPEG at another size, and resize them back."""
    found = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image[..., 0]).resize((side, side), Image.Resampling.BICUBIC).save(
            file, "JPEG", quality=90
        )
        with Image.open(file) as picture:
            found.append(np.asarray(picture.resize(image.shape[:2], Image.Resampling.LANCZOS)))
    return np.stack(found)[..., None]


def images_of(*parts: np.ndarray, **more) -> ImageSet:
    images = np.concatenate(parts)
    return ImageSet(images, np.arange(len(images)) % 2, ("a", "b"), **more)


@pytest.fixture(scope="module")
def drawn() -> np.ndarray:
    """Draw eighty different pictures of 64 × 64."""
    return drawn_set("glyphs", (1, 64, 64), 8).images[:80]


@pytest.mark.parametrize("side", [64, 40, 96])
def test_copies_of_training_images_are_left_out_and_counted(drawn, side):
    train = drawn[:40]
    fresh = drawn[40:60]
    copied = train[:10] if side == 64 else resized(train[:10], side)
    groups = np.arange(30)
    given = images_of(copied, fresh, groups=groups)
    left, (warning,) = without_copies(given, images_of(train), "keyed")
    assert "resized (copies: 10 of 30 hold-out" in warning and np.array_equal(left.images, fresh)
    assert np.array_equal(left.groups, groups[10:]) and np.array_equal(
        left.labels, np.arange(10, 30) % 2
    )
    assert "remove near-duplicates" in warning and "at random" not in warning
    (warning,) = without_copies(given, images_of(train), "official")[1]
    assert "a hold-out is drawn at random" in warning and "near-duplicates" not in warning


def test_a_hold_out_without_copies_is_itself(drawn, digits):
    holdout = images_of(drawn[40:])
    assert without_copies(holdout, images_of(drawn[:40]), "keyed") == (holdout, [])
    first = digits.take(np.arange(400))
    others = digits.take(np.arange(400, 1797))
    assert without_copies(first, others, "keyed") == (first, [])


def test_a_few_that_look_alike_are_no_copies_and_equal_ones_are(drawn):
    """Different images may look nearly the same, such as trousers, so a few of them do not count as
    copies. An equal image always counts as a copy.
    """
    train = drawn[:1]
    holdout = np.repeat(drawn[1:2], round(2 / LOOK_ALIKES), axis=0)
    holdout[0] = resized(train, 60)[0]
    assert without_copies(images_of(holdout), images_of(train), "official")[1] == []
    holdout[1] = train[0]
    left, (warning,) = without_copies(images_of(holdout), images_of(train), "official")
    assert "(copies: 1 of 200 hold-out images)" in warning and len(left) == 199


@pytest.mark.parametrize(("several", "left", "lost"), [(0, 9, 1), (0, 10, 0), (1, 9, 1)])
def test_a_class_that_lost_nearly_all_its_images_is_named(drawn, several, left, lost):
    """Pictures by a fixed camera resemble each other, so all pictures of one class may count as
    copies.
    """
    labels = np.repeat([0, 1], 100)
    if several:
        labels = np.eye(3, dtype=np.uint8)[labels]
    holdout = ImageSet(drawn[np.arange(200) % 80], labels, ("ok", "broken", "other"))
    reason = lost_classes(holdout, holdout.take(np.arange(100 - left, 200)))
    assert (reason is not None) == bool(lost)
    assert reason is None or f"for example, 'ok' has {left} of 100 images left" in reason
    assert lost_classes(holdout, holdout) is None


@pytest.mark.parametrize("side", [64, 40])
def test_images_that_resemble_another_are_in_no_test_for_copies(drawn, side):
    """Images of the same person are an exception: they may resemble each other."""
    pictures = drawn[:60]
    again = pictures if side == 64 else resized(pictures, side)
    train = np.concatenate([pictures[:40], again[:3]])
    holdout = np.concatenate([pictures[40:], again[3:5], again[40:42]])
    persons = np.arange(43)
    left = without_repeats(images_of(train, groups=persons), images_of(holdout))
    assert np.array_equal(left[0].images, pictures[5:40]) and len(left[0].groups) == 35
    assert np.array_equal(left[1].images, pictures[42:])
    persons[40:] = persons[:3]
    left = without_repeats(images_of(train, groups=persons), images_of(holdout))
    assert np.array_equal(left[0].images, np.delete(train, [3, 4], axis=0))
    alone = images_of(train[:3]), images_of(again[:3])
    assert without_repeats(*alone) == alone, "a test without images is impossible"


def test_copies_within_a_set_give_no_alarm(drawn):
    """If only the hold-out lost its copies of training images, training images would repeat more
    often than hold-out images, and the test could give an alarm.
    """
    random = np.random.default_rng(0)
    pictures = random.integers(0, 256, (2700, 8, 8, 1), np.uint8)
    rows = random.permutation(np.concatenate([np.arange(2700), np.arange(300)]))
    train, holdout = (images_of(pictures[part]) for part in np.split(rows, [2400]))
    often = {image.tobytes() for image in pictures[:300]}

    def losses(real: ImageSet) -> np.ndarray:
        rare = [image.tobytes() not in often for image in real.images]
        return np.array(rare) + random.random(len(real))

    left = without_copies(holdout, train, "keyed")[0]
    assert not compare_sets(losses, *without_repeats(train, holdout), random)["rings"]
    assert compare_sets(losses, train, left, random)["rings"], "copies have low losses"


def test_a_blank_or_one_class_hold_out_cannot_judge(drawn):
    black_and_white = np.stack([np.full_like(drawn[0], value) for value in (0, 255)])
    for images, why in (
        (drawn[:0], "has only 0 (of 0 images)"),
        (drawn[:1], "has only 1 (of 1 images)"),
        (drawn[[0, 0, 0]], "has only 1 (of 3 images)"),
        (black_and_white, "has only 0 (of 2 images)"),
    ):
        assert why in unusable(images_of(images))
    assert "belong to the same class" in unusable(
        ImageSet(drawn, np.ones(80, dtype=np.int64), ("a", "b"))
    )
    assert unusable(images_of(drawn[:2])) is None
    several = np.tile([1, 0], (80, 1))
    assert "have the same labels" in unusable(ImageSet(drawn, several, ("a", "b")))
    several[0, 1] = 1
    assert unusable(ImageSet(drawn, several, ("a", "b"))) is None
