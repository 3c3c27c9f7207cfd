import numpy as np
import pytest

from sfumato.data.images import ImageSet
from sfumato.data.lineage import overlapping, refuse_overlap
from sfumato.errors import DataError

IMAGES = np.random.default_rng(0).integers(0, 256, (40, 5, 4, 1), dtype=np.uint8)


def image_set(images, label=0):
    return ImageSet(images, np.full(len(images), label), ("a", "b"))


def test_sets_without_a_common_image_do_not_overlap():
    assert (
        overlapping(
            image_set(IMAGES[:20]), [image_set(IMAGES[20:30]), image_set(IMAGES[30:])]
        ).tolist()
        == []
    )
    assert overlapping(image_set(IMAGES[:0]), [image_set(IMAGES)]).tolist() == []


def test_duplicates_are_found_across_parts_and_labels():
    public = image_set(np.concatenate([IMAGES[:10], IMAGES[[25, 35, 25]]]), label=1)
    for label in (0, 1):
        private = [image_set(part, label) for part in (IMAGES[20:30], IMAGES[30:])]
        assert overlapping(public, private).tolist() == [10, 11, 12]


def test_one_private_image_among_the_public_ones_is_refused():
    public = np.concatenate([IMAGES[:10], IMAGES[[25]]])
    refuse_overlap(image_set(public[:10]), [image_set(IMAGES[20:])])
    with pytest.raises(DataError, match="1 of the 11 public images"):
        refuse_overlap(image_set(public), [image_set(IMAGES[20:])])


def test_a_bit_or_shape_but_no_memory_order_changes_the_image(tmp_path):
    changed = IMAGES.copy()
    changed[:, 0, 0, 0] ^= 1
    assert overlapping(image_set(changed), [image_set(IMAGES)]).tolist() == []
    assert overlapping(image_set(IMAGES.reshape(40, 4, 5, 1)), [image_set(IMAGES)]).tolist() == []
    np.save(tmp_path / "x.npy", IMAGES)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    strided = np.asfortranarray(IMAGES)
    assert overlapping(image_set(strided), [image_set(mapped)]).tolist() == list(range(40))
