"""The detector distinguishes sets that differ, and no others."""

import numpy as np
import pytest
from PIL import Image

from sfumato.data.images import ImageSet
from sfumato.evaluation import detector
from sfumato.evaluation.detector import detect, detections
from sfumato.evaluation.plots import plot_detected


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(detector, "STEPS", 100)


@pytest.fixture(scope="module")
def halves(digits):
    order = np.random.default_rng(0).permutation(len(digits))
    return tuple(digits.take(part) for part in np.array_split(order, 2))


def speckled(image_set: ImageSet, rows: np.ndarray) -> ImageSet:
    images = image_set.images.copy()
    images[rows, ::2, ::2] = 255 - images[rows, ::2, ::2]
    return ImageSet(images, image_set.labels, image_set.classes)


def test_real_images_cannot_be_told_from_real_ones(halves):
    """About 450 images of each set are tested. The tolerance, 0.07, is four standard errors, so
    there is one false alarm in 16 000 runs.
    """
    assert abs(detect(*halves).accuracy - 0.5) < 0.07


def test_images_with_several_labels_are_detected_without_class(halves, short_judging):
    labels = [
        np.stack([half.labels > 3, half.labels % 2 == 0, half.labels == 7], axis=1)
        for half in halves
    ]
    sets = [
        ImageSet(h.images, own.astype(np.uint8), ("a", "b", "c"))
        for h, own in zip(halves, labels, strict=True)
    ]
    # For any labels, half of all images are tested
    assert len(detect(*sets).images) == len(halves[1])


def test_images_that_give_themselves_away_are_ranked_first(halves):
    spoilt = np.arange(len(halves[0])) % 2 == 0
    found = detect(speckled(halves[0], spoilt), halves[1])
    assert 0.65 < found.accuracy < 0.85  # half are unchanged, so at best about 3/4
    drawn = found.images[found.drawn]
    seen = {image.tobytes() for image in speckled(halves[0], spoilt).images[spoilt]}
    first = drawn[np.argsort(-found.scores[found.drawn])][:50]
    assert np.mean([image.tobytes() in seen for image in first]) > 0.9


def test_shares_of_the_classes_do_not_tell_the_sets_apart(halves):
    """One set has only the digits 0 to 4, the other has all digits. Of each class, both sets
    contribute the same number of images to the comparison.
    """
    few = halves[0].take(np.flatnonzero(halves[0].labels < 5))
    found = detect(few, halves[1])
    assert found.drawn.sum() == (~found.drawn).sum() and abs(found.accuracy - 0.5) < 0.1
    assert detect(few, halves[1].take(np.flatnonzero(halves[1].labels > 4))) is None


def test_yardsticks_stand_beside_the_sets(halves, tmp_path):
    found = detections({"release": speckled(halves[0], np.arange(len(halves[0])))}, *halves)
    assert list(found) == ["release", "real", "blurred"]
    assert found["real"].accuracy < 0.6 < min(found["release"].accuracy, found["blurred"].accuracy)
    plot_detected(found["release"], tmp_path / "detected.png")
    plot_detected(found["release"], tmp_path / "detected.svg")
    assert Image.open(tmp_path / "detected.png").width > 700
    assert "local: not for release" in (tmp_path / "detected.svg").read_text()
