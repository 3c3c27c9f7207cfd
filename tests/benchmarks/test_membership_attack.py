"""Membership inference finds copies, and finds nothing where there is nothing."""

import numpy as np
import pytest
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


@pytest.mark.parametrize("grouped", [True, False])
def test_images_of_the_same_person_give_no_false_alarm(grouped, monkeypatch):
    """By chance, an interval lies above 1/2 in 2.5 % of cases if it is computed over persons, and
    in 20 % if it is computed over images. So if persons are known, 7 or more alarms in 80 attacks
    have a probability of 0.4 %.
    """
    monkeypatch.setattr("sfumato.evaluation.downstream.RESAMPLES", 100)
    random = np.random.default_rng(0)

    def pictures(persons: int, each: int) -> ImageSet:
        of_person = np.arange(persons).repeat(each)
        images = random.integers(0, 200, (persons, 4, 4, 1))[of_person]
        images = (images + random.integers(0, 56, images.shape)).astype(np.uint8)
        labels = random.integers(0, 2, persons)[of_person]
        return ImageSet(images, labels, ("a", "b"), of_person if grouped else None)

    runs = [membership(pictures(40, 1), pictures(40, 8), pictures(40, 8)) for _ in range(40)]
    alarms = [attack.outcome != "finds nothing" for attacks in runs for attack in attacks]
    assert (sum(alarms) < 7) == grouped
