import numpy as np
import pytest

from sfumato.data.images import ImageSet
from sfumato.data.lineage import overlapping


def image_set(images):
    return ImageSet(images, np.zeros(len(images), np.int64), ("a", "b"))


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (40, 5, 4, 1), dtype=np.uint8)


def test_sets_without_a_common_image_do_not_overlap(images):
    assert overlapping(image_set(images[:20]), [image_set(images[20:30]), image_set(images[30:])]).tolist() == []
    assert overlapping(image_set(images[:0]), [image_set(images)]).tolist() == []


def test_duplicates_are_found_in_either_part_whatever_their_label(images):
    public = ImageSet(np.concatenate([images[:10], images[[25, 35, 25]]]), np.ones(13, np.int64), ("x", "y"))
    for label in (0, 1):
        private = [ImageSet(part, np.full(len(part), label), ("a", "b")) for part in (images[20:30], images[30:])]
        assert overlapping(public, private).tolist() == [10, 11, 12]


def test_one_bit_makes_another_image_and_so_does_another_shape_but_not_another_order_in_memory(images, tmp_path):
    changed = images.copy()
    changed[:, 0, 0, 0] ^= 1
    assert overlapping(image_set(changed), [image_set(images)]).tolist() == []
    assert overlapping(image_set(images.reshape(40, 4, 5, 1)), [image_set(images)]).tolist() == []
    np.save(tmp_path / "x.npy", images)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    strided = np.asfortranarray(images)
    assert overlapping(image_set(strided), [image_set(mapped)]).tolist() == list(range(40))
