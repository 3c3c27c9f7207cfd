import pytest
import torch

from sfumato.generators.network import Generator


@pytest.mark.parametrize(("resolution", "channels"), [(4, 1), (8, 1), (28, 1), (32, 3), (30, 3), (64, 1)])
def test_images_have_the_shape_and_range_asked_for(resolution, channels):
    generator = Generator(resolution, channels, 5, latent=7, width=8)
    images = generator(torch.randn(6, 7), torch.arange(6) % 5)
    assert images.shape == (6, channels, resolution, resolution) and images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1


def test_labels_and_noise_both_change_the_image():
    generator = Generator(8, 1, 5, latent=7, width=8).eval()
    z = torch.randn(2, 7, generator=torch.Generator().manual_seed(0))
    first = generator(z, torch.tensor([0, 0]))
    assert not torch.allclose(first, generator(z, torch.tensor([1, 1])))
    assert not torch.allclose(first[0], first[1])


def test_its_config_rebuilds_it():
    generator = Generator(32, 3, 4, latent=9, width=8).eval()
    twin = Generator(**generator.config()).eval()
    twin.load_state_dict(generator.state_dict())
    z, labels = torch.randn(3, 9), torch.tensor([0, 1, 3])
    assert torch.equal(generator(z, labels), twin(z, labels))


def test_every_weight_gets_a_gradient():
    generator = Generator(28, 1, 5, latent=7, width=8)
    generator(torch.randn(6, 7), torch.arange(6) % 5).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in generator.parameters())
