"""DP-GAN: one image moves the sum of the discriminator's gradients by the clip.

`tests/privacy/test_what_dpsgd_releases.py` tests what an observer sees of a run.
"""

import pytest
import torch
from baseline_cases import adversary, discriminator
from cases import CLASSES, GivenCharge, drawn_images
from dpsgd_runs import CLIP, check_clip, check_rows
from small_network import draw_images

from sfumato.baselines.settings import Adversarial
from sfumato.diffusion.ema import EMA
from sfumato.dpsgd.gradients import draw

B = 6


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 11, 11)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("draws", [1, 4])
def test_one_image_moves_the_discriminators_sum_by_the_clip(draws, layout, shape):
    model = discriminator(shape[1], shape[0])
    shown, labels = drawn_images(B, shape=shape)
    shown = shown.to(memory_format=layout)
    drawn = draw(model, shown, draws, Adversarial.noise_levels, torch.Generator().manual_seed(1))
    check_clip(model, dict(model.named_parameters()), (shown, labels, drawn), CLIP, 4)


def test_an_images_gradient_equals_a_loops():
    model, (shown, labels) = discriminator(), drawn_images(B)
    drawn = draw(model, shown, 2, Adversarial.noise_levels, torch.Generator().manual_seed(1))
    check_rows(
        model, dict(model.named_parameters()), (shown, labels, drawn), lambda i: labels[i].expand(2)
    )


def test_without_noise_the_generator_draws_what_the_images_show(monkeypatch):
    """The upper or the lower half of each image is bright, depending on its class. After 60 steps,
    a generated image is far nearer to its class than a grey image would be.
    """
    for name in ("learning_rate", "generator_rate"):
        monkeypatch.setattr(Adversarial, name, 5e-3)
    monkeypatch.setattr(EMA.__init__, "__defaults__", (0.9,))
    state = adversary(max_grad_norm=1.0, microbatch_size=32)
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % CLASSES
    above = (torch.arange(8) < 4).float()[:, None].expand(8, 8)
    truth = torch.where((labels < 5)[:, None, None], above, 1 - above)[:, None]
    state.public_batch = 40.0
    for _ in range(60):
        shown = (truth + 0.1 * torch.randn(truth.shape, generator=random)).clamp(0, 1)
        state.step(GivenCharge([(shown, labels)]))
    found, own = draw_images(state.result(), 100)
    wanted = torch.where((own < 5)[:, None, None], above, 1 - above)[:, None]
    grey = (wanted - 0.5).square().mean()
    assert (found - wanted).square().mean() < 0.4 * grey
