import dataclasses

import numpy as np
import pytest

from sfumato.evaluation.extractors import Extractor

IMAGES = np.random.default_rng(0).integers(0, 256, size=(9, 4, 4, 1), dtype=np.uint8)


@pytest.fixture
def counted():
    """Return an extractor of two features, and a list of the sizes of the batches shown to it."""
    shown = []

    def embed(images):
        shown.append(len(images))
        return images.flatten(1)[:, :2]

    return Extractor(name="two", digest="weights-1", embed=embed), shown


def test_features_are_computed_once_by_each_extractor(counted):
    extractor, shown = counted
    first = extractor(IMAGES)
    again = extractor(np.array(IMAGES))
    assert sum(shown) == 9 and np.array_equal(first, again) and first.dtype == np.float32
    dataclasses.replace(extractor, digest="weights-2")(IMAGES)
    assert sum(shown) == 18


def test_other_images_or_another_shape_are_other_features(counted):
    extractor, shown = counted
    many = np.zeros((5000, 4, 4, 1), dtype=np.uint8)
    changed = IMAGES.copy()
    last = many.copy()
    changed[4, 2, 1, 0] ^= 1
    last[-1, -1, -1] = 1
    others = (IMAGES, changed, IMAGES[:8], IMAGES.reshape(9, 2, 8, 1), IMAGES[::-1], many, last)
    for images in (*others, np.asfortranarray(IMAGES)):
        extractor(images)
    assert sum(shown) == sum(map(len, others))
