"""Membership inference finds copies, and finds nothing where there is nothing."""

import numpy as np
from membership import membership

from sfumato.data.images import ImageSet


def sets(seed: int, copied: int) -> tuple[ImageSet, ImageSet, ImageSet]:
    """Return a release with this many copies of sensitive images, the sensitive set and the
    hold-out.
    """
    random = np.random.default_rng(seed)
    classes = ("a", "b")
    images = [random.integers(0, 256, (300, 6, 6, 1), dtype=np.uint8) for _ in range(3)]
    labels = [random.integers(0, 2, 300) for _ in range(3)]
    images[0][:copied], labels[0][:copied] = images[1][:copied], labels[1][:copied]
    return tuple(ImageSet(i, y, classes) for i, y in zip(images, labels, strict=True))  # type: ignore[return-value]


def test_membership_is_found_only_where_images_were_copied():
    copied = membership(*sets(0, 150))
    assert copied[0].low > 0.6 and copied[0].hits > 0.4 and "distinguishable" in copied[0].outcome
    alike = membership(*sets(1, 0))  # fixed seed
    assert [attack.outcome for attack in alike] == ["finds nothing"] * 2 and all(
        a.low < 0.5 < a.high for a in alike
    )


def test_a_class_that_the_release_lacks_stops_no_attack():
    release, sensitive, holdout = sets(2, 0)
    keep = release.labels == 0
    only = ImageSet(release.images[keep], release.labels[keep], release.classes)
    assert all(np.isfinite(attack.auc) for attack in membership(only, sensitive, holdout))
