import math

import pytest
import torch

from sfumato.diffusion.denoiser import draw_noise_levels, schedule
from sfumato.diffusion.objective import denoise, per_image_loss, to_image_range, to_model_range
from sfumato.settings.noise_levels import LogNormal, TimestepMixture


def nothing(x, c_noise, labels):
    return torch.zeros_like(x)


def test_ranges_are_inverse_and_clamped():
    images = torch.rand(2, 1, 4, 4)
    assert torch.allclose(to_image_range(to_model_range(images)), images, atol=1e-6)
    assert to_image_range(torch.tensor([-3.0, 3.0])).tolist() == [0, 1]


def test_without_a_network_the_denoiser_is_the_best_linear_one():
    # For data N(0, s²) the best estimate from x = y + σn is x·s²/(s² + σ²): EDM's c_skip.
    x = torch.randn(3, 1, 2, 2)
    sigma = torch.tensor([0.01, 0.5, 50.0])
    shrink = 0.3**2 / (0.3**2 + sigma**2)
    found = denoise(nothing, x, sigma, torch.zeros(3).long(), 0.3)
    assert torch.allclose(found, x * shrink[:, None, None, None], atol=1e-6)


def test_network_input_and_target_have_unit_variance():
    generator = torch.Generator().manual_seed(0)
    for sigma_data, level in [(0.5, 0.02), (0.5, 0.5), (0.5, 30.0), (0.2, 1.0)]:
        images = (sigma_data * torch.randn(64, 1, 32, 32, generator=generator) + 1) / 2
        noise = torch.randn(64, 1, 32, 32, generator=generator)
        sigma = torch.full((64,), level)
        seen = []

        def record(x, c_noise, labels, seen=seen):
            seen.append((x, c_noise))
            return torch.zeros_like(x)

        # If the network returns 0, λ·mean((D − y)²) is the variance of its target
        loss = per_image_loss(
            record, images, torch.zeros(64).long(), sigma, noise, sigma_data
        ).mean()
        assert float(loss) == pytest.approx(1, rel=0.03)
        assert float(seen[0][0].std()) == pytest.approx(1, rel=0.03)
        assert float(seen[0][1][0]) == pytest.approx(math.log(level) / 4, abs=1e-6)


def test_a_perfect_network_has_no_loss():
    images = torch.rand(4, 1, 3, 3)
    noise = torch.randn(4, 1, 3, 3)
    sigma = torch.tensor([0.1, 1.0, 5.0, 0.4])
    clean = to_model_range(images)
    s = sigma[:, None, None, None]

    def oracle(x, c_noise, labels):
        noisy = clean + s * noise
        return (clean - noisy * 0.25 / (s**2 + 0.25)) * (s**2 + 0.25).sqrt() / (s * 0.5)

    assert per_image_loss(oracle, images, torch.zeros(4).long(), sigma, noise).max() < 1e-9


def test_log_normal_levels_have_their_law():
    n = 20_000
    logs = draw_noise_levels(
        LogNormal(mean=-0.5, std=0.7), n, torch.Generator().manual_seed(0)
    ).log()
    # The tolerance is five standard errors. The seed is fixed; with another one, the false-alarm
    # rate is below 2e-6.
    assert float(logs.mean()) == pytest.approx(-0.5, abs=5 * 0.7 / math.sqrt(n))
    assert float(logs.std()) == pytest.approx(0.7, abs=5 * 0.7 / math.sqrt(2 * n))
    assert draw_noise_levels(LogNormal(), 0, torch.Generator()).shape == (0,)


def test_timestep_mixture_has_its_weights_and_bounds():
    n = 20_000
    sigmas = schedule(torch.device("cpu"))
    law = TimestepMixture(weights=(1.0, 18.0, 1.0), bounds=(10, 200, 800, 1000))
    drawn = draw_noise_levels(law, n, torch.Generator().manual_seed(0))
    t = torch.searchsorted(sigmas, drawn)
    assert torch.equal(sigmas[t], drawn)
    assert t.min() >= 10
    for low, high, share in [(10, 200, 0.05), (200, 800, 0.9), (800, 1000, 0.05)]:
        inside = float(((t >= low) & (t < high)).double().mean())
        # False alarm below 1e-6
        assert inside == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / n))
    assert {200, 799} <= set(t.tolist())  # both ends of the middle part are drawn
    assert draw_noise_levels(law, 0, torch.Generator()).shape == (0,)


def test_the_timestep_schedule_is_ddpm_s():
    sigmas = schedule(torch.device("cpu"))
    assert float(sigmas[0]) == pytest.approx(math.sqrt(1e-4 / (1 - 1e-4)), rel=1e-4)
    assert float(sigmas[-1]) == pytest.approx(157.4, rel=1e-3)
    assert (sigmas.diff() > 0).all()
