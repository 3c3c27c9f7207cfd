import math

import pytest
import torch
from torch import nn

from sfumato.diffusion.denoiser import Denoiser, Sampling
from sfumato.diffusion.sampler import SIGMA_MAX, SIGMA_MIN, noise_schedule, sample
from sfumato.diffusion.unet import UNet
from sfumato.runtime.compute import LARGE_NETWORK
from sfumato.settings.training import Architecture


class Gaussian(Denoiser):
    """The exact network for images from N(mean of the label, std²), in [-1, 1].

    The label 2, which is the number of classes, means that there is no label. Its mean is 0.
    """

    resolution = 4
    channels = 1
    classes = 2
    sigma_data = 0.5

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = nn.Parameter(torch.tensor(std))
        self.means = torch.tensor([-0.3, 0.3, 0.0])

    def forward(self, x, c_noise, labels):
        s = (4 * c_noise).exp()[:, None, None, None]
        mean = self.means[labels][:, None, None, None]
        total = (s**2 + self.sigma_data**2).sqrt()
        noisy = x * total
        best = mean + (noisy - mean) * self.std**2 / (self.std**2 + s**2)
        return (best - noisy * (self.sigma_data / total) ** 2) * total / (s * self.sigma_data)


def draw(model, labels, **options):
    return sample(model, labels, generator=torch.Generator().manual_seed(0), **options) * 2 - 1


def test_schedule_falls_from_the_largest_level_to_zero():
    levels = noise_schedule(18)
    assert float(levels[0]) == pytest.approx(SIGMA_MAX, rel=1e-5)
    assert float(levels[-2]) == pytest.approx(SIGMA_MIN, rel=1e-3)
    assert levels[-1] == 0 and (levels.diff() < 0).all()
    assert (len(levels), len(noise_schedule(1))) == (19, 2)


def test_a_gaussian_is_recovered_per_label():
    # The means are 4.7 standard deviations away from the limits -1 and 1, so clamping is rare
    n, std = 2000, 0.15
    labels = torch.arange(2).repeat_interleave(n)
    images = draw(Gaussian(std), labels, steps=32)
    for label, mean in [(0, -0.3), (1, 0.3)]:
        part = images[labels == label]
        # The tolerance is five standard errors, plus 1 % for the solver. With another seed, the
        # false-alarm rate is below 1e-6.
        assert float(part.mean()) == pytest.approx(
            mean, abs=5 * std / math.sqrt(part.numel()) + 0.003
        )
        assert float(part.std()) == pytest.approx(std, rel=5 / math.sqrt(2 * part.numel()) + 0.01)


def test_heun_is_of_second_order():
    exact, *found = (
        draw(Gaussian(0.15), torch.zeros(50).long(), steps=steps) for steps in (512, 8, 16, 32)
    )
    errors = [float((images - exact).norm()) for images in found]
    assert errors[0] / errors[1] > 3 and errors[1] / errors[2] > 3


def test_guidance_moves_away_from_the_unconditional_mean():
    # For two Gaussians of equal width, D + g(D − D_u) is the denoiser of a Gaussian with mean
    # m + g(m − m_u)
    images = draw(Gaussian(0.1), torch.ones(1000).long(), steps=32, guidance=0.5)
    assert float(images.mean()) == pytest.approx(0.3 * 1.5, abs=0.005)


def test_images_depend_on_neither_batch_nor_neighbours():
    model = Gaussian(0.15)
    labels = torch.tensor([0, 1, 1, 0, 1])
    whole = draw(model, labels, steps=4)
    random = torch.Generator().manual_seed(0)
    pairs = [sample(model, part, 4, generator=random) * 2 - 1 for part in labels.split(2)]
    assert torch.allclose(torch.cat(pairs), whole, atol=1e-5)
    assert torch.allclose(draw(model, labels[:3], steps=4), whole[:3], atol=1e-5)
    assert not torch.allclose(whole[0], whole[3])


def test_output_is_float32_in_range_under_autocast():
    images = sample(Gaussian(3.0), torch.zeros(3).long(), steps=3, autocast=True)
    assert images.dtype == torch.float32 and images.min() >= 0 and images.max() <= 1
    assert sample(Gaussian(1.0), torch.empty(0).long(), steps=3).shape == (0, 1, 4, 4)


@pytest.mark.parametrize(("known", "large"), [(False, True), (True, False), (True, True)])
def test_a_large_network_draws_the_same_images_in_bfloat16(bfloat16, known, large):
    torch.manual_seed(0)
    width = 64 if large else 8
    model = UNet(8, 1, 3, Architecture(width=width, multipliers=(1,), attention=()))
    labels = torch.tensor([0, 1, 2])
    assert (sum(value.numel() for value in model.parameters()) >= LARGE_NETWORK) == large
    torch.nn.init.normal_(model.conv_out.weight, std=0.3 / width**0.5)
    bfloat16(known)
    asked = []
    model.register_forward_pre_hook(lambda *_: asked.append(torch.is_autocast_enabled("cpu")))
    random = torch.Generator()
    images = torch.cat(
        [*model.drawing(labels, Sampling(steps=4, guidance=0.5), random.manual_seed(0))]
    )
    assert set(asked) == {known and large}
    exact = sample(model, labels, 4, 0.5, random.manual_seed(0))
    assert torch.allclose(images, exact, atol=0.02 if known and large else 1e-6)


def test_a_guide_draws_from_the_product_of_both_densities():
    # For images from N(0, s²) and a guide with p(label | image) ~ exp(-(image - a)² / 2t²), the
    # product of the densities is N(m, v)
    spread = Gaussian.sigma_data
    target = 1.0
    width = 2.0

    def guide(denoised, labels, variance):
        return variance * (target - denoised) / width**2

    labels = torch.full((2000,), 2)
    drawn = draw(Gaussian(spread), labels, steps=40, guide=guide)
    variance = 1 / (spread**-2 + width**-2)
    # The expected mean is 0.059, and its standard error is 0.003
    assert float(drawn.mean()) == pytest.approx(variance * target / width**2, abs=0.01)
    assert abs(float(draw(Gaussian(spread), labels, steps=40).mean())) < 0.01
