import pytest
import torch

from sfumato.generators.network import Generator
from sfumato.settings.fields import both_sides


@pytest.mark.parametrize(
    ("resolution", "channels"),
    [(4, 1), (8, 1), (28, 1), (32, 3), (30, 3), (64, 1), ((24, 32), 3), ((40, 12), 1)],
)
def test_images_have_the_requested_shape_and_range(resolution, channels):
    generator = Generator(resolution, channels, 5, latent=7, width=8)
    images = generator(torch.randn(6, 7), torch.arange(6) % 5)
    assert images.shape == (6, channels, *both_sides(resolution)) and images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1
    images.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in generator.parameters())
