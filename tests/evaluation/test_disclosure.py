"""The test for copies is exact, is conservative with ties, and compares persons if they are known.

It gives an alarm if one released image in a hundred is a copy, and no alarm if there are no copies.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from sfumato.data.images import ImageSet, save_images
from sfumato.evaluation import disclosure as disclosed
from sfumato.evaluation.disclosure import compare_nearness, disclosure, membership
from sfumato.evaluation.extractors import Extractor
from sfumato.release.release import generated_images

PIXELS = Extractor(name="pixels", digest="pixels", embed=lambda images: images.flatten(1))


def test_p_equals_the_share_among_all_orders():
    """There are 330 orders of 7 training units and 4 strangers (hold-out units), if units of one
    kind are not distinguished. p is the share of orders in which at least `seen` training units
    come before the first stranger.
    """
    orders = [set(places) for places in itertools.combinations(range(11), 4)]
    before = [min(strangers) for strangers in orders]
    for seen in range(8):
        strangers = np.array([seen, *range(20, 23)]) - 0.5
        found = compare_nearness(np.arange(7.0), strangers, "images")
        assert found["near"] == seen and found["rank"] == 1
        assert found["p"] == pytest.approx(np.mean([number >= seen for number in before]))
    assert found["chance"] == pytest.approx(np.mean(before))


def test_false_alarms_are_at_most_as_frequent_as_stated():
    """Test 1000 honest releases, twice.

    With fresh seeds, the number of small p-values would exceed one of the limits in at most about
    one of 1000 runs.
    """
    rng = np.random.default_rng(0)
    for n, m in ((300, 80), (900, 450)):
        found = [compare_nearness(rng.random(n), rng.random(m), "images") for _ in range(1000)]
        for rate, most in ((0.001, 6), (0.05, 74)):
            assert sum(one["p"] <= rate for one in found) <= most, (n, m, rate)
        assert all(one["rings"] == (one["p"] <= 0.001) for one in found)


def test_equal_distances_count_for_innocence():
    """Distances cannot distinguish copies from strangers if the nearest hold-out images are as near
    to the release as copies would be.
    """
    found = compare_nearness(np.zeros(500), np.zeros(100), "images")
    assert (found["near"], found["p"], found["rings"], found["epsilon"]) == (0, 1, False, 0)
    rng = np.random.default_rng(1)
    whole = [
        compare_nearness(rng.integers(9, size=300), rng.integers(9, size=80), "images")
        for _ in range(300)
    ]
    # Even without ties, the probability of an alarm in any of the 300 comparisons is at most 26 %
    assert not any(found["rings"] for found in whole)


def test_the_bound_on_epsilon_is_clopper_and_pearsons():
    near = np.concatenate([np.zeros(40), np.ones(760)])
    strangers = np.arange(1.0, 201.0) / 100
    found = compare_nearness(near, strangers, "images")

    # The lower limit is wrong with a probability of 1.25 %, a quarter of 5 %, in each of two tests.
    # The upper limit below is wrong with a probability of 2.5 %.
    def low_odds(count, k):
        low = binomtest(count, count + k - 1).proportion_ci(1 - 0.025).low
        return low / (1 - low)

    high = binomtest(800, 1000).proportion_ci(0.95).high
    expected = max(math.log(low_odds(40, k) * (1 - high) / high) for k in (1, 2))
    assert found["rings"] and found["epsilon"] == pytest.approx(expected) and 0.5 < expected < 1.5
    # The probability that 40 draws contain no stranger, doubled because there are two tests
    assert found["p"] == pytest.approx(2 * math.prod((800 - i) / (1000 - i) for i in range(40)))


@pytest.mark.parametrize("epsilon", [1.0, 3.0])
def test_the_bound_on_epsilon_fails_at_most_once_in_twenty(epsilon):
    """Each unit is used for training with odds of 4 : 1. For the 300 units nearest to the release,
    the odds are e^ε times as high, the most that an ε-private release allows.

    In 200 trials, more than 20 failures have a probability of about 0.001.
    """
    rng = np.random.default_rng(0)
    failures = 0
    bounds = []
    odds = 4 * math.exp(epsilon)
    for _ in range(200):
        member = rng.random(5000) < 0.8
        member[:300] = rng.random(300) < odds / (1 + odds)
        places = np.arange(5000.0)
        bounds.append(compare_nearness(places[member], places[~member], "images")["epsilon"])
        failures += bounds[-1] > epsilon
    assert failures <= 20 and np.median(bounds) > 0.15 * epsilon


def test_the_largest_undetected_number_is_as_stated():
    """`unseen` copies give no alarm, but one more copy gives an alarm, even if all other training
    images are farther from the release than every stranger.
    """
    for n, m in ((800, 200), (1440, 350), (5000, 500), (500, 5), (200, 20), (1000, 2)):
        unseen = compare_nearness(np.arange(n) + 1.0, np.arange(m) + 0.5, "images")["unseen"]
        for copies in (unseen, unseen + 1):
            near = np.where(np.arange(n) < copies, 0.0, m + 9.0)
            found = compare_nearness(near, np.arange(m) + 1.0, "images")
            assert found["rings"] == (copies > unseen), (n, m, copies)


@pytest.mark.parametrize(("n", "m"), [(20, 2), (12, 3), (900, 1)])
def test_a_hold_out_too_small_for_any_alarm_is_reported(n, m):
    for near in (np.zeros(n), np.full(n, 2.0)):
        found = compare_nearness(near, np.ones(m), "persons")
        assert not found["rings"] and found["unseen"] == n
        assert "cannot give an alarm, because the hold-out is too small" in found["sentence"]
        assert "no sign of copying" not in found["sentence"]


def images(pool, rows):
    return ImageSet(pool.images[rows], pool.labels[rows], pool.classes)


@pytest.fixture(scope="module")
def pool(digits):
    """Draw 6000 digits of 8×8 pixels, and add noise to each, so that all are different."""
    rng = np.random.default_rng(0)
    drawn = images(digits, rng.integers(len(digits), size=6000))
    noisy = (drawn.images + rng.integers(-40, 41, drawn.images.shape)).clip(0, 255).astype(np.uint8)
    assert len(np.unique(noisy.reshape(6000, -1), axis=0)) == 6000
    return ImageSet(noisy, drawn.labels, drawn.classes)


def split(pool, seed, copied):
    """Return a release of 2000 images, 2000 training images and 1000 strangers.

    The first `copied` images of the release are copies of training images. Its other images are
    neither training images nor strangers.
    """
    rows = np.random.default_rng(seed).permutation(len(pool))
    train = rows[:2000]
    holdout = rows[2000:3000]
    release = rows[3000:5000]
    return (
        images(pool, np.concatenate([train[:copied], release[copied:]])),
        images(pool, train),
        images(pool, holdout),
    )


@pytest.mark.parametrize(("copied", "loud"), [(0, False), (20, True)])
def test_one_copy_in_a_hundred_raises_the_alarm(pool, copied, loud):
    """An honest release gives an alarm with a probability of at most 0.001. With fresh seeds, an
    alarm for one of 20 honest releases would occur in at most one of 50 runs.
    """
    found = [disclosure(*split(pool, seed, copied), PIXELS) for seed in range(20)]
    assert [one["rings"] for one in found] == [loud] * 20
    words = "A SIGN OF COPYING" if loud else "no sign of copying"
    assert all(
        words in one["sentence"] and "Of 2\u202f000 images used for training, " in one["sentence"]
        for one in found
    )


def test_mirrored_copies_raise_the_alarm(pool):
    release, train, holdout = split(pool, 0, 20)
    mirrored = ImageSet(release.images[:, :, ::-1].copy(), release.labels, release.classes)
    assert disclosure(mirrored, train, holdout, PIXELS)["rings"]


def test_a_person_is_one_unit_as_near_as_the_nearest_image(pool):
    release, train, holdout = split(pool, 0, 0)
    people = [
        ImageSet(part.images, part.labels, part.classes, np.arange(len(part)) // 5)
        for part in (train, holdout)
    ]
    found = disclosure(release, *people, PIXELS)
    assert (found["units"], found["strangers"]) == (400, 200) and "Of 400 persons" in found[
        "sentence"
    ]
    loud = ImageSet(
        np.concatenate([train.images[:100:5], release.images[20:]]), release.labels, release.classes
    )
    found = disclosure(loud, *people, PIXELS)
    assert found["rings"] and found["near"] >= 20


def test_equal_images_count_once(pool):
    """Equal images are held out together or not at all. So ten equal images near the release are
    one coincidence, not ten.
    """
    release, train, holdout = split(pool, 0, 0)
    rows = np.concatenate([np.arange(len(train)), np.repeat(np.arange(10), 50)])
    assert disclosure(release, images(train, rows), holdout, PIXELS) == disclosure(
        release, train, holdout, PIXELS
    )


def test_a_large_set_is_thinned_by_units(pool, monkeypatch):
    monkeypatch.setattr(disclosed, "MOST_REAL", 1000)
    monkeypatch.setattr(disclosed, "MOST_RELEASED", 1000)
    release, train, holdout = split(pool, 0, 1000)
    found = disclosure(release, train, holdout, PIXELS)
    assert (found["units"], found["strangers"]) == (1000, 1000) and found["rings"]


def test_public_images_are_not_tested_for_a_stated_reason(pool, tmp_path):
    save_images(tmp_path, part := images(pool, np.arange(50)))
    assert generated_images(part, tmp_path).images.shape == part.images.shape
    np.save(tmp_path / "kinds.npy", np.repeat(["plain", "public", "blend"], [10, 20, 20]))
    drawn = generated_images(part, tmp_path)
    assert np.array_equal(drawn.images, np.delete(part.images, np.s_[10:30], axis=0))
    np.save(tmp_path / "kinds.npy", np.repeat(["public"], 50))
    assert generated_images(part, tmp_path) is None
    found = disclosure(None, part, part, PIXELS)
    assert [*found] == ["sentence"] and "all released images are public" in found["sentence"]


def test_images_drawn_from_the_networks_are_tested_too(digits):
    """Copies among the images that recipients draw are found, even if the release has none."""
    real = np.array(digits.images[:1200])
    train, holdout = (
        ImageSet(part, np.zeros(len(part), np.int64), ("a",)) for part in (real[:600], real[600:])
    )
    release = ImageSet(255 - real[:100], np.zeros(100, np.int64), ("a",))
    assert not disclosure(release, train, holdout, PIXELS)["rings"]
    assert disclosure(release, train, holdout, PIXELS, extra_images=real[:300])["rings"]


class Knows(torch.nn.Module):
    """A classifier with two classes that is certain of stored images, and uncertain of others."""

    several = False
    classes = 2

    def __init__(self, stored: np.ndarray) -> None:
        super().__init__()
        self.stored = torch.from_numpy(stored).flatten(1).float() / 255

    def forward(self, images):
        known = (torch.cdist(images.flatten(1), self.stored).min(dim=1).values < 1e-4).float()
        return torch.stack([4 * known, torch.zeros(len(images))], dim=1)


def test_a_network_that_knows_training_images_rings(digits):
    real = np.unique(digits.images, axis=0)[:1200]
    train, holdout = (
        ImageSet(part, np.zeros(len(part), np.int64), ("a", "b"))
        for part in (real[::2], real[1::2])
    )
    for stored, rings in ((real[::2][:60], True), (real[:120], False)):
        found = membership(Knows(stored), train, holdout)
        assert found["rings"] is rings and "sentence" not in found, "no release was tested"
