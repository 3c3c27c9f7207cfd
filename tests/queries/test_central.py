import pytest
import torch

from sfumato.privacy.charge import Charge
from sfumato.privacy.rows import bounded_sum
from sfumato.queries.central import mean_rows, mode_rows, query_central
from sfumato.settings.queries import Central
from sfumato.training.central_images import finish_images, mode_images


class Noiseless:
    """A charge without noise: each pass draws everything, each release returns the sum."""

    def __init__(self, images, labels):
        self.images, self.labels, self.uses = images, labels, 0

    def batches(self, size, *, labels_only=False):
        yield self.images, self.labels

    def release(self, total, max_norm, integer=False):
        self.uses += 1
        return total

    sum = Charge.sum

    def probe(self):
        return self.images.new_zeros(1, *self.images.shape[1:]), torch.tensor([-1])


@pytest.fixture(scope="module")
def sample(digits):
    return digits.batch(range(500))


def test_without_noise_the_mean_is_the_class_mean(sample):
    images, labels = sample
    means = query_central(Noiseless(images, labels), torch.bincount(labels).double(), (1, 8, 8), Central(repeats=1))
    assert means.shape == (1, 10, 1, 8, 8) and means.dtype == torch.float32
    for m in range(10):
        torch.testing.assert_close(means[0, m], images[labels == m].mean(0))


def test_every_repeat_is_a_use_of_the_charge(sample):
    charge = Noiseless(*sample)
    assert query_central(charge, torch.ones(10), (1, 8, 8), Central(repeats=4)).shape[0] == 4
    assert charge.uses == 4


def test_pooling_averages_before_the_clip(sample):
    images, labels = sample
    pooled = bounded_sum(mean_rows(images[:1], labels[:1], 10, pool=4), 100.0)[labels[0]].flatten()
    by_hand = torch.stack(
        [images[0, 0, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4].mean() for i in range(2) for j in range(2)]
    )
    torch.testing.assert_close(pooled.float(), by_hand)


def test_the_mode_of_repeated_images_is_the_image_up_to_half_a_bin(sample):
    images = sample[0][:10].repeat(3, 1, 1, 1)
    labels = torch.arange(10).repeat(3)
    for bins in (2, 5, 16):
        settings = Central(repeats=1, statistic="mode", bins=bins)
        histograms = query_central(Noiseless(images, labels), torch.full((10,), 3.0), (1, 8, 8), settings)
        assert histograms.shape == (1, 10, bins, 1, 8, 8)
        assert (mode_images(histograms)[0] - images[:10]).abs().max() <= 0.5 / bins + 1e-6


def test_the_mode_counts_every_pixel_once(sample):
    total = bounded_sum(mode_rows(*sample, 10, bins=4), 8.0).unflatten(1, (4, 64))
    assert (total.sum(1) == torch.bincount(sample[1])[:, None]).all()


def test_finished_images_are_full_size_and_in_range(sample):
    noisy = torch.randn(3, 10, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    finished = finish_images(noisy, (8, 8), median=3)
    assert finished.shape == (3, 10, 1, 8, 8)
    assert finished.min() >= 0 and finished.max() <= 1


def test_the_median_removes_a_lone_pixel_and_keeps_an_edge():
    image = torch.zeros(1, 1, 8, 8)
    image[..., 4:] = 1
    spoiled = image.clone()
    spoiled[0, 0, 2, 1] = 1
    assert torch.equal(finish_images(spoiled[None], (8, 8), 3)[0], image)


def test_mistakes_are_named(sample):
    charge = Noiseless(*sample)
    with pytest.raises(ValueError, match="pool=4 does not divide"):
        query_central(charge, torch.ones(10), (1, 6, 6), Central(repeats=1, pool=4))
    with pytest.raises(ValueError, match="max_norm"):
        query_central(charge, torch.ones(10), (1, 8, 8), Central(repeats=1, statistic="mode", max_norm=1.0))
    with pytest.raises(ValueError, match="median"):
        query_central(charge, torch.ones(10), (1, 8, 8), Central(repeats=1, statistic="median"))
    assert charge.uses == 0
