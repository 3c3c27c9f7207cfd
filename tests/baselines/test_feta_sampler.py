"""A denoiser fitted to a release through its own sampler, alone or as a phase of the warm-up."""

import pytest
import torch
from small_network import draw_images

from sfumato.baselines import feta_sampler
from sfumato.baselines.feta_sampler import SampledGenerator, fit_phases, load_drawing, new_sampled
from sfumato.diffusion.ema import ema_model
from sfumato.diffusion.unet import UNet
from sfumato.features.fourier import FourierFeatures
from sfumato.generators.one_step import Match, fit_generator, save_generator
from sfumato.settings.queries import FeatureMap
from sfumato.settings.training import Fit, Phase, Pretrain
from sfumato.training.curriculum import warm_up

SHAPE, CLASSES = (1, 4, 4), 2
PRIORS = torch.full((CLASSES,), 0.5)


def truth(labels: torch.Tensor) -> torch.Tensor:
    """Class 0 is bright above, class 1 below."""
    above = (torch.arange(4) < 2).float()[:, None].expand(4, 4)
    return torch.where((labels == 0)[:, None, None], above, 1 - above)[:, None]


def release() -> Match:
    features = FourierFeatures(SHAPE, [FeatureMap(length_scales=(0.5,))], 400, seed=0)
    onehot = torch.eye(CLASSES)
    return Match(features.embed(truth(torch.arange(CLASSES)), onehot * PRIORS).detach(), features)


def denoiser() -> UNet:
    torch.manual_seed(0)
    return UNet(4, 1, CLASSES, width=8, multipliers=(1,), attention=())


def error(generator) -> float:
    images, labels = draw_images(generator, 60)
    return float((images - truth(labels)).square().mean())


def test_a_denoiser_learns_a_release_through_its_sampler():
    generator = SampledGenerator(denoiser())
    before = error(generator)
    fit_generator(generator, [release()], Fit(steps=60, batch=20, learning_rate=1e-2), PRIORS, seed=0)
    assert error(generator) < 0.4 * before


def test_every_step_of_the_sampler_has_a_part_in_the_gradient():
    model = denoiser()
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.2)
    asked = []
    model.register_forward_hook(lambda module, given, output: asked.append(output.requires_grad))
    images = SampledGenerator(model)(torch.randn(2, 16), torch.tensor([0, 1]))
    images.sum().backward()
    assert images.shape == (2, 1, 4, 4) and asked == [True] * feta_sampler.STEPS
    assert all(value.grad is not None and value.grad.isfinite().all() for value in model.parameters())


def test_what_was_saved_draws_the_same_images(tmp_path):
    generator = new_sampled(SHAPE, CLASSES, 8, seed=0)
    for value in generator.parameters():
        torch.nn.init.normal_(value, std=0.2)
    save_generator(generator, tmp_path)
    found = load_drawing(tmp_path)
    assert isinstance(found, SampledGenerator)
    assert torch.allclose(draw_images(found, 10)[0], draw_images(generator, 10)[0], atol=1e-5)


def shown():
    labels = torch.arange(20) % CLASSES
    return {"central": (truth(labels), labels)}


def test_a_phase_that_fits_goes_on_from_the_phase_before_it():
    phases = ({"sources": {"central": 1}, "steps": 2}, {"sources": {"frequency": 1}, "steps": 2})
    settings, told = Pretrain(phases=phases, learning_rate=1e-3), []
    model = denoiser()
    fit_phases(model, settings, shown(), release(), PRIORS, 0, lambda done, total: told.append((done, total)))
    first = denoiser()
    ema_model(first, warm_up(first, settings.phases[:1], shown(), 0))
    moved = [float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), first.parameters(), strict=True)]
    assert 0 < max(moved) < 0.1 and told[-1] == (4, 4)


@pytest.mark.parametrize("other", [{"sources": {"central": 1, "frequency": 1}}, {"augment": 2}, {"amp": {}}])
def test_a_phase_that_fits_shows_no_image(other):
    with pytest.raises(ValueError, match="shows it no image"):
        Phase(**{"sources": {"frequency": 1}, "steps": 1, **other})
