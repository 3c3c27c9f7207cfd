"""DP-GAN: one image moves the discriminator's sum by the clip, and all else follows from what was released."""

import pytest
import torch
from cases import GivenCharge
from small_network import draw_images
from torch import Tensor

from sfumato.baselines import dp_gan
from sfumato.baselines.dp_gan import LATENT, LEVELS, WIDTH, AdversarialState, Discriminator, train_dp_gan
from sfumato.dpsgd.gradients import clipped_gradient_sum, draw, per_image_gradients
from sfumato.dpsgd.run import gradient_sum
from sfumato.generators.one_step import new_generator
from sfumato.privacy.events import Mechanism
from sfumato.settings.baselines import Adversarial

B, C, CLASSES = 6, 1e-3, 10
UNIFORM = torch.full((CLASSES,), 1 / CLASSES)


def discriminator(resolution: int = 8, channels: int = 1) -> Discriminator:
    torch.manual_seed(0)
    model = Discriminator(resolution, channels, CLASSES, 4)
    torch.nn.init.normal_(model.by_label.weight, std=0.1)
    return model


def trainer(seed: int = 0, **options) -> AdversarialState:
    config = Adversarial(**{"max_grad_norm": C, "microbatch_size": 4, **options})
    network = new_generator((1, 8, 8), CLASSES, LATENT, WIDTH, 0)
    random = torch.Generator().manual_seed(seed)
    return AdversarialState(
        discriminator(), network, config, UNIFORM, 0, public_batch=16.0, autocast=False, generator=random
    )


def images(count: int, seed: int = 0, resolution: int = 8, channels: int = 1) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shown = torch.rand(count, channels, resolution, resolution, generator=random)
    return shown, torch.randint(CLASSES, (count,), generator=random)


@pytest.mark.parametrize(("resolution", "channels"), [(8, 1), (11, 3)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("draws", [1, 4])
def test_one_image_moves_the_discriminator_s_sum_by_at_most_the_clip(draws, layout, resolution, channels):
    model = discriminator(resolution, channels)
    parameters = dict(model.named_parameters())
    shown, labels = images(B, 0, resolution, channels)
    shown = shown.to(memory_format=layout)
    drawn = draw(model, shown, draws, LEVELS, torch.Generator().manual_seed(1))
    rows = per_image_gradients(model, parameters, shown, labels, drawn)
    norms = torch.cat([part.flatten(1) for part in rows.values()], dim=1).norm(dim=1)
    assert norms.min() > 2 * C  # or the test would say nothing
    whole = clipped_gradient_sum(model, parameters, shown, labels, drawn, C, 4)
    for i in range(B):
        rest = torch.arange(B) != i
        without = clipped_gradient_sum(model, parameters, shown[rest], labels[rest], drawn.rows(rest), C, 4)
        moved = float(torch.linalg.vector_norm(whole - without))
        assert 0.99 * C < moved <= C * (1 + 1e-5)


def test_an_image_s_gradient_is_that_of_a_loop_and_sees_no_other_image():
    model = discriminator()
    shown, labels = images(B)
    drawn = draw(model, shown, 2, LEVELS, torch.Generator().manual_seed(1))
    rows = per_image_gradients(model, dict(model.named_parameters()), shown, labels, drawn)
    for i in range(B):
        twice, own = shown[i].expand(2, -1, -1, -1), labels[i].expand(2)
        loss = model.per_image_loss(twice, own, drawn.levels[i], drawn.noise[i]).mean()
        for part, expected in zip(rows.values(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            assert torch.allclose(part[i], expected, atol=1e-6)


def test_an_image_that_is_not_finite_adds_nothing():
    shown, labels = images(B)
    shown[2] = float("nan")
    state = trainer()
    total = gradient_sum(state, GivenCharge([(shown, labels)]))
    assert total.isfinite().all() and 0 < float(total.norm()) <= (B - 1) * C * (1 + 1e-5)


def test_both_networks_and_the_log_follow_from_the_released_sums_alone():
    """No number of generated images, no rate and no statistic comes from a draw: other images, more, or none."""
    found = []
    for drawn in ([images(5), images(5, 1)], [images(9, 3), images(1, 4)], [images(0), images(30, 2)]):
        state = trainer()
        charge = GivenCharge(drawn, torch.randn(state.size, generator=torch.Generator().manual_seed(9)))
        rows = [state.step(charge) for _ in drawn]
        assert {bound for _, bound in charge.seen} == {C}
        found.append((rows, state.tensors()))
    (rows, tensors), *others = found
    assert any(name.startswith("generator.") for name in tensors)
    for other_rows, other in others:
        assert other_rows == rows and other.keys() == tensors.keys()
        assert all(torch.equal(value, other[name]) for name, value in tensors.items())


def test_a_checkpoint_holds_both_networks_averages_and_moments_and_nothing_else():
    state = trainer()
    state.step(GivenCharge([images(3)]))
    kinds = {name.split(".")[0] for name in state.tensors()}
    own = {"step", "parameters", "ema", "exp_avg", "exp_avg_sq"}
    moments = {f"generator_{key}" for key in ("ema", "exp_avg", "exp_avg_sq", "step")}
    assert kinds == own | moments | {"generator", "generator_steps"}


def test_a_run_goes_on_from_its_state():
    drawn = [images(9, seed) for seed in range(4)]
    straight = trainer()
    for pair in drawn:
        straight.step(GivenCharge([pair]))
    broken = trainer()
    for pair in drawn[:2]:
        broken.step(GivenCharge([pair]))
    resumed = trainer(seed=5)
    resumed.load(broken.tensors())
    resumed.generator.set_state(broken.generator.get_state())  # only here: in a real run the draws are fresh
    for pair in drawn[2:]:
        resumed.step(GivenCharge([pair]))
    again = resumed.tensors()
    assert all(torch.equal(value, again[name]) for name, value in straight.tensors().items())
    one, other = (draw_images(state.result(), 20)[0] for state in (straight, resumed))
    assert torch.equal(one, other)


def test_a_killed_run_goes_on_and_is_charged_once(owner):
    mechanism, charges, told = Mechanism(noise_multiplier=2.0, sample_rate=0.01, uses=4), [], []

    def open_charge():
        charges.append(owner.open(mechanism, stage="adversarial", max_norm=C))
        return charges[-1]

    def run_until(last: int):
        def kill(done: int, total: int) -> None:
            if done == last:
                raise KeyboardInterrupt

        state = trainer(seed=last, checkpoint_every=1)
        found = train_dp_gan(state, open_charge, epsilon_after=float, report=kill, say=told.append)
        return state, found

    with pytest.raises(KeyboardInterrupt):
        run_until(2)
    charges[-1]._lock.close()
    state, (charge, log) = run_until(-1)
    assert [row["step"] for row in log] == [1, 2, 3, 4] and state.pupil.steps == 4
    assert told == [f"adversarial: resuming run {charge.run.name[:8]} after step 2: no further charge"]
    assert owner.odometer.opened() == [charge.record]


def test_without_noise_the_generator_draws_what_the_images_show(monkeypatch):
    """Two kinds of images, bright above or below: after some steps the generated ones are far nearer than grey."""
    monkeypatch.setattr(dp_gan, "GENERATOR_RATE", 5e-3)
    monkeypatch.setattr(dp_gan, "EMA_DECAY", 0.9)
    state = trainer(learning_rate=5e-3, max_grad_norm=1.0, microbatch_size=32)
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
