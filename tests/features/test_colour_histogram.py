"""The colour histogram ignores the places of pixels. Each colour counts by its share of pixels."""

import pytest
import torch

from sfumato.features.colour_histogram import LEVELS, ColourHistogram
from sfumato.features.fourier import FourierFeatures
from sfumato.settings.queries import FeatureMap


@pytest.mark.parametrize("channels", [1, 3])
def test_the_places_of_pixels_do_not_matter_and_their_colours_do(channels):
    images = torch.rand(4, channels, 12, 16, generator=torch.Generator().manual_seed(0))
    seen = ColourHistogram(images.shape[1:])
    moved = images.flatten(2)[..., torch.randperm(192)].view_as(images)
    torch.testing.assert_close(seen(moved), seen(images))
    assert seen(images).shape == (4, LEVELS**channels)
    assert (seen(1 - images) - seen(images)).norm(dim=1).min() > 0.1


def test_a_colour_has_its_share_of_the_pixels_in_its_own_column():
    image = torch.zeros(1, 3, 8, 8)
    image[:, 0, :2] = 1.0  # a quarter is red, the rest is black
    row = ColourHistogram((3, 8, 8))(image).square()[0]
    red = (LEVELS - 1) * LEVELS**2
    black = 0
    assert row.argsort(descending=True)[:2].tolist() == [black, red] and row[1:red].max() < 1e-6
    assert row[red] / row[black] == pytest.approx(1 / 3, abs=0.03)


def test_a_generators_pixels_have_finite_gradients_in_blocks():
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images[0] = 0.0
    images.requires_grad_()
    maps = [
        FeatureMap(map="colour-histogram", length_scales=(0.25,), block=block) for block in (1, 4)
    ]
    features = FourierFeatures((3, 16, 16), maps, 40, seed=0)
    features(images).square()[:, ::3].sum().backward()
    assert images.grad.isfinite().all() and images.grad[1].abs().sum() > 0
