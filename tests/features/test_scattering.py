import pytest
import torch
import torch.nn.functional as F

from sfumato.features import FEATURES
from sfumato.features.fourier import FourierFeatures
from sfumato.features.scattering import Filtered, block_average, morlet
from sfumato.settings.fields import both_sides
from sfumato.settings.queries import FeatureMap


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(3, 2, 12, 8), (2, 1, 28, 28), (2, 3, 7, 10)])
@pytest.mark.parametrize("size", [1, 2, 4, (1, 2), (4, 2)])
def test_a_mean_of_cells_and_its_gradient_equal_poolings(shape, size, layout):
    planes = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    planes = planes.to(memory_format=layout)
    one = planes.clone().requires_grad_()
    other = planes.clone().requires_grad_()
    sides = both_sides(size)
    found = block_average(one, *sides)
    expected = F.avg_pool2d(other, size, ceil_mode=True)
    assert torch.equal(block_average(planes, *sides), expected) and torch.allclose(
        found, expected, atol=1e-12
    )
    wanted = torch.randn(
        expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    (first,), (second,) = (
        torch.autograd.grad(found, one, wanted),
        torch.autograd.grad(expected, other, wanted),
    )
    assert torch.allclose(first, second, atol=1e-12)


@pytest.mark.parametrize(
    ("precision", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("shape", [(3, 1, 9, 14), (2, 1, 28, 28), (2, 1, 4, 4)])
def test_the_gradient_of_fixed_filters_is_a_convolutions(shape, precision, tolerance):
    random = torch.Generator().manual_seed(0)
    planes = torch.rand(shape, generator=random).to(precision)
    filters = morlet(8).to(precision)
    one = planes.clone().requires_grad_()
    other = planes.double().requires_grad_()
    found = Filtered.apply(one, filters)
    expected = F.conv2d(other, filters.double(), padding=3)
    wanted = torch.randn(expected.shape, generator=random).to(precision)
    assert torch.equal(found.detach(), F.conv2d(planes, filters, padding=3))
    (first,) = torch.autograd.grad(found, one, wanted)
    (second,) = torch.autograd.grad(expected, other, wanted.double())
    assert first.dtype == precision and first.shape == shape
    assert (first - second).abs().max() < tolerance * second.abs().max()


def test_frequencies_are_the_same_in_every_precision():
    features = FourierFeatures((1, 8, 8), [FeatureMap(), FeatureMap(map="scattering")], 40, seed=0)
    images = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    rows = features(images)
    with torch.autocast("cpu", torch.bfloat16):
        half = features(images)
    assert torch.allclose(half.float(), rows, atol=2e-2)
    assert torch.allclose(
        features.from_maps(features.vectors(images).double()).float(), rows, atol=1e-5
    )
    assert torch.equal(features(images), rows)
    assert features.state_dict() == {}


MAPS = [
    FeatureMap(block=4),
    FeatureMap(map="deep-scattering", length_scales=(0.8,), block=2),
    FeatureMap(map="moduli", kernel="linear"),
]


@pytest.mark.parametrize("size", [64, 50, 97, (48, 64), (64, 32), (5, 68), (97, 41)])
def test_block_means_determine_cells_of_maps_of_that_size(size):
    shape = 1, *both_sides(size)
    features = FourierFeatures(shape, MAPS, 60, seed=0)
    images = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    weights = F.one_hot(torch.tensor([0, 1, 1, 0]), 2).float()
    whole = features.embed(images, weights)
    assert torch.allclose(whole, features(images).T @ weights, atol=1e-5)
    assert torch.allclose(features(images).norm(dim=1), torch.ones(4), atol=1e-5)
    assert (
        features.active(1).all()
        and 0 < features.active(4).sum() < features.active(2).sum() < features.size
    )
    for block in (2, 4) if size in (64, (48, 64), (64, 32)) else ():
        active = features.active(block)
        assert torch.allclose(
            features.embed(block_average(images, block), weights)[active], whole[active], atol=1e-4
        )


@pytest.mark.parametrize("side", [64, 128, 224])
def test_maps_of_large_images_stay_small(side):
    widths = {
        name: FEATURES[name]((1, side, side))(torch.rand(1, 1, side, side)).shape[1]
        for name in FEATURES
    }
    assert all(width <= 2 * 64**2 for name, width in widths.items() if name != "tangent"), widths
