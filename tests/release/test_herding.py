import numpy as np
import pytest
import torch

from sfumato.features import FeatureMeans
from sfumato.features.fourier import FourierFeatures
from sfumato.release.herding import choose_by_herding, nearest_mean
from sfumato.settings.queries import FeatureMap


@pytest.fixture(scope="module")
def features():
    return FourierFeatures((1, 8, 8), [FeatureMap(map="pixels", length_scales=(0.5,))], 200, 0)


@pytest.fixture(scope="module")
def drawn(digits):
    """Return 400 images as a model draws them. Half of the first class are zeros, half are ones."""
    zeros = np.flatnonzero(digits.labels == 0)[:100]
    ones = np.flatnonzero(digits.labels == 1)[:100]
    twos = np.resize(np.flatnonzero(digits.labels == 2), 200)
    images = torch.from_numpy(digits.images[np.concatenate([zeros, ones, twos])]).permute(
        0, 3, 1, 2
    )
    return images, torch.tensor([0] * 200 + [1] * 200)


@pytest.fixture(scope="module")
def means(drawn, features):
    """Return the means of a set. Its first class, a quarter of the set, has nine times as many
    zeros as ones. Its second class has only twos.
    """
    rows = features(drawn[0] / 255)
    first = 0.9 * rows[:100].mean(0) + 0.1 * rows[100:200].mean(0)
    return FeatureMeans(torch.stack([0.25 * first, 0.75 * rows[200:].mean(0)], dim=1), features)


def test_the_kept_images_have_the_releases_proportions(drawn, means):
    rows = choose_by_herding(*drawn, means, torch.tensor([0.25, 0.75]), 100)
    zeros = (rows < 100).sum()
    ones = ((rows >= 100) & (rows < 200)).sum()
    assert zeros + ones == 50 and 3 <= ones <= 8
    assert len(rows) == len(rows.unique()) == 100


def test_their_mean_is_nearer_than_of_a_random_choice(drawn, means, features):
    target = means.table[:, 1] / 0.75
    rows = features(drawn[0][200:] / 255)
    chosen = nearest_mean(rows, target, 50)
    assert (rows[chosen].mean(0) - target).norm() < 0.5 * (rows[:50].mean(0) - target).norm()


def test_the_first_is_the_nearest_and_the_others_make_up_for_it():
    rows = torch.nn.functional.normalize(
        torch.tensor([[1.0, 0.1], [1.0, -0.1], [0.9, 0.2], [0.0, 1.0]]), dim=1
    )
    assert nearest_mean(rows, torch.tensor([1.0, 0.05]), 3).tolist() == [0, 1, 2]


def test_a_class_missing_from_the_release_keeps_its_first(drawn, means):
    rows = choose_by_herding(*drawn, means, torch.tensor([0.0, 1.0]), 100)
    assert rows[drawn[1][rows] == 0].tolist() == list(range(50))


def test_exactly_the_requested_number_is_kept(drawn, means, monkeypatch):
    monkeypatch.setattr("sfumato.release.herding.IMAGES_PER_PART", 37)
    for number in (1, 99, 133):
        rows = choose_by_herding(*drawn, means, torch.tensor([0.25, 0.75]), number)
        assert len(rows) == len(rows.unique()) == number
        assert abs(int((drawn[1][rows] == 0).sum()) - number / 2) <= 1
    zeros = (choose_by_herding(*drawn, means, torch.tensor([0.25, 0.75]), 100) < 100).sum()
    assert zeros >= 25, "each part has the proportions of the release as far as it can"


def test_images_far_from_the_mean_are_left_out_first():
    angles = torch.cat([torch.linspace(-0.3, 0.3, 19), torch.tensor([2.5])])
    rows = torch.stack([angles.cos(), angles.sin()], dim=1)
    # The mean of any of the first 19 rows is about (1, 0). With the last row, it would be nearer to
    # the target
    target = torch.tensor([0.5, 0.0])
    assert 19 not in nearest_mean(rows, target, 12)
    assert 19 in nearest_mean(rows, target, 20)
