import numpy as np
import pytest
import torch
from scipy.ndimage import median_filter

from sfumato.privacy.rows import bounded_sum
from sfumato.queries.central import mode_rows, query_central
from sfumato.settings.queries import Central
from sfumato.training.training_sets import load_central


class Noiseless:
    """A charge that draws everything and adds no noise."""

    def __init__(self, images, labels):
        self.images = images
        self.labels = labels
        self.uses = 0

    def sum(self, rows_of, max_norm, **_):
        self.uses += 1
        return bounded_sum(rows_of(self.images, self.labels), max_norm)


@pytest.fixture(scope="module")
def sample(digits):
    return digits.batch(range(500))


def test_the_mean_without_noise_is_the_class_mean(sample):
    (images, labels), charge = sample, Noiseless(*sample)
    means = query_central(charge, torch.bincount(labels).double(), (1, 8, 8), Central(repeats=4))
    assert means.shape == (4, 10, 1, 8, 8) and means.dtype == torch.float32 and charge.uses == 4
    for m in range(10):
        torch.testing.assert_close(means[:, m], images[labels == m].mean(0).expand(4, -1, -1, -1))


def test_the_mode_of_repeated_images_is_the_blurred_image(sample, tmp_path):
    images = sample[0][:10].repeat(3, 1, 1, 1)
    blurred = median_filter(images[:10].numpy(), (1, 1, 3, 3), mode="nearest")
    labels = torch.arange(10).repeat(3)
    for bins in (2, 5, 16):
        settings = Central(repeats=1, statistic="mode", bins=bins)
        histograms = query_central(
            Noiseless(images, labels), torch.full((10,), 3.0), (1, 8, 8), settings
        )
        assert histograms.shape == (1, 10, bins, 1, 8, 8)
        np.save(tmp_path / "mode.npy", histograms.numpy())
        shown, _ = load_central(tmp_path, (1, 8, 8))
        assert np.abs(shown.numpy() - blurred).max() <= 0.5 / bins + 1e-6


def test_the_mode_counts_every_pixel_once(sample):
    total = bounded_sum(mode_rows(*sample, 10, bins=4), 8.0).unflatten(1, (4, 64))
    assert (total.sum(1) == torch.bincount(sample[1])[:, None]).all()


def test_the_median_removes_a_lone_pixel_and_keeps_an_edge(tmp_path):
    image = torch.zeros(1, 1, 8, 8)
    image[..., 4:] = 1
    spoiled = image.clone()
    spoiled[0, 0, 2, 1] = 1
    np.save(tmp_path / "mean.npy", spoiled[None].numpy())
    assert torch.equal(load_central(tmp_path, (1, 8, 8))[0], image)


def test_mistakes_are_named(sample):
    charge = Noiseless(*sample)
    with pytest.raises(ValueError, match="median"):
        query_central(charge, torch.ones(10), (1, 8, 8), Central(repeats=1, statistic="median"))
    assert charge.uses == 0
