"""The sensitivity of the DP-SGD sum, on a real network with attention."""

import dataclasses

import pytest
import torch
from small_network import perturbed
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from sfumato.diffusion.objective import per_image_loss
from sfumato.diffusion.unet import UNet
from sfumato.dpsgd.clip import clipped_sum, squared_norms, unflatten
from sfumato.dpsgd.gradients import clipped_gradient_sum, draw, per_draw, per_image_gradients
from sfumato.dpsgd.run import State, fine_tune, step, step_noise, update
from sfumato.privacy.events import Mechanism
from sfumato.settings.dpsgd import Finetune
from sfumato.settings.noise_levels import TimestepMixture

B, C = 6, 0.01  # images, clip: far below the gradient norms, so every row is clipped
LAW = TimestepMixture()


@pytest.fixture(scope="module")
def model() -> UNet:
    torch.manual_seed(0)  # levels of 5 and 3 pixels
    return perturbed(
        UNet(10, 3, 4, width=8, multipliers=(1, 2), attention=(0, 1), unshuffle=2)
    )  # levels of 5 and 3 pixels


def batch(model: UNet, draws: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(B, model.channels, model.resolution, model.resolution, generator=generator)
    labels = torch.randint(model.classes, (B,), generator=generator)
    return images, labels, draw(model, images, draws, LAW, generator, label_dropout=0.2)


def matrix(model: UNet, parameters: dict[str, Tensor], *rest, **options) -> Tensor:
    """Per-image gradients as rows of one matrix, (B, P)."""
    return torch.cat(
        [part.flatten(1) for part in per_image_gradients(model, parameters, *rest, **options).values()], dim=1
    )


def summed(rows: Tensor, max_norm: float) -> Tensor:
    return clipped_sum({"a": rows.clone()}, max_norm)


def names(model: UNet) -> dict[str, Tensor]:
    return dict(model.named_parameters())


@pytest.mark.parametrize("draws", [1, 8])
def test_per_image_gradients_are_those_of_a_loop(model, draws):
    images, labels, drawn = batch(model, draws)
    rows = matrix(model, names(model), images, labels, drawn)
    for i in range(B):
        copies = per_draw(images, drawn)[i]
        shown = torch.where(drawn.drop[i], model.classes, labels[i])
        loss = per_image_loss(model, copies, shown, drawn.levels[i], drawn.noise[i]).mean()
        expected = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
        assert torch.linalg.vector_norm(rows[i] - expected) < 1e-4 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("draws", [1, 8])
def test_per_image_gradients_of_several_labels_are_those_of_a_loop(draws):
    """Of none, one, two and all labels; a row that is not of 0 and 1 counts as no label."""
    torch.manual_seed(0)
    model = UNet(8, 1, 4, width=8, multipliers=(1,), attention=(0,), several=True)
    torch.nn.init.normal_(model.conv_out.weight)
    images, _, drawn = batch(model, draws)
    labels = torch.tensor([[0] * 4, [0, 1, 0, 0], [1, 0, 1, 0], [1] * 4, [1, 255, 0, 0], [0, 0, 0, 1]]).to(torch.uint8)
    rows = matrix(model, names(model), images, labels, drawn)
    for i in range(B):
        shown = model.hidden(labels[i].expand(draws, -1), drawn.drop[i] | (i == 4))
        loss = per_image_loss(model, per_draw(images, drawn)[i], shown, drawn.levels[i], drawn.noise[i]).mean()
        expected = parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
        assert torch.linalg.vector_norm(rows[i] - expected) < 1e-4 * torch.linalg.vector_norm(expected)


def test_the_draws_of_an_image_are_averaged_before_the_clip(model):
    images, labels, drawn = batch(model, 8)
    each = [
        matrix(model, names(model), images, labels, drawn_k)
        for drawn_k in (
            dataclasses.replace(drawn, **{n: v[:, k : k + 1] for n, v in vars(drawn).items()}) for k in range(8)
        )
    ]
    total = clipped_gradient_sum(model, names(model), images, labels, drawn, C, microbatch_size=4)
    averaged_first = summed(torch.stack(each).mean(0), C)
    clipped_first = sum(summed(rows, C) for rows in each)
    assert torch.allclose(total, averaged_first, atol=1e-4 * C)
    assert torch.linalg.vector_norm(total - clipped_first) > C  # the mistake would not pass


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("draws", [1, 8])
def test_one_image_moves_the_sum_by_at_most_the_clip(model, draws, chunk, layout):
    images, labels, drawn = batch(model, draws)
    images = images.to(memory_format=layout)
    norms = torch.linalg.vector_norm(matrix(model, names(model), images, labels, drawn), dim=1)
    assert norms.min() > 2 * C  # or the test would say nothing
    whole = clipped_gradient_sum(model, names(model), images, labels, drawn, C, chunk)
    for i in range(B):
        rest = torch.arange(B) != i
        without = clipped_gradient_sum(model, names(model), images[rest], labels[rest], drawn.rows(rest), C, chunk)
        moved = float(torch.linalg.vector_norm(whole - without))
        assert moved <= C * (1 + 1e-5)
        assert moved > 0.99 * C


def test_channels_last_colour_images_and_parameters_change_nothing():
    torch.manual_seed(0)
    model = UNet(8, 3, 4, width=8, multipliers=(1, 1), attention=(1,))
    torch.nn.init.normal_(model.conv_out.weight)
    images, labels, drawn = batch(model, 2)
    rows = matrix(model, names(model), images, labels, drawn)
    nhwc = images.to(memory_format=torch.channels_last)
    model.to(memory_format=torch.channels_last)
    again = matrix(model, names(model), nhwc, labels, drawn)
    assert torch.allclose(again, rows, atol=1e-4 * float(rows.norm(dim=1).max()))


def test_one_image_moves_the_sum_by_at_most_the_clip_in_bfloat16(model):
    images, labels, drawn = batch(model, 8)
    whole = clipped_gradient_sum(model, names(model), images, labels, drawn, C, 4, autocast=True)
    assert whole.dtype == torch.float32
    for i in range(B):
        rest = torch.arange(B) != i
        without = clipped_gradient_sum(
            model, names(model), images[rest], labels[rest], drawn.rows(rest), C, 4, autocast=True
        )
        assert torch.linalg.vector_norm(whole - without) <= C * (1 + 1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_an_image_s_gradient_does_not_depend_on_how_many_were_drawn(model, autocast):
    # not even by rounding: in bfloat16, rounding times a batch of thousands would exceed the bound
    images, labels, drawn = batch(model, 8)
    first = torch.arange(B) < 1
    alone = clipped_gradient_sum(model, names(model), images[:1], labels[:1], drawn.rows(first), C, 4, autocast)
    copies = torch.zeros(B, dtype=torch.int64)  # the same image and draws in every place
    draws_per_pass = clipped_gradient_sum(
        model, names(model), images[copies], labels[copies], drawn.rows(copies), C, 4, autocast
    )
    assert torch.allclose(draws_per_pass, B * alone, rtol=1e-5, atol=1e-6 * C)


def test_an_empty_draw_is_a_zero_sum(model):
    images, labels, drawn = batch(model, 8)
    none = slice(0, 0)
    total = clipped_gradient_sum(model, names(model), images[none], labels[none], drawn.rows(none), C, 4)
    assert total.shape == (sum(p.numel() for p in model.parameters()),)
    assert not total.any()
    assert len(draw(model, images[none], 8, LAW, torch.Generator())) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("draws", [1, 8])
def test_a_non_finite_image_counts_for_nothing_and_spoils_nothing(model, draws, value):
    images, labels, drawn = batch(model, draws)
    images[2, 0, 3, 3] = value
    rest = torch.arange(B) != 2
    whole = clipped_gradient_sum(model, names(model), images, labels, drawn, C, 4)
    without = clipped_gradient_sum(model, names(model), images[rest], labels[rest], drawn.rows(rest), C, 4)
    assert whole.isfinite().all()
    assert torch.linalg.vector_norm(whole - without) <= C * 1e-4


def test_a_row_is_clipped_or_kept_or_dropped():
    rows = torch.tensor([[3.0, 4.0], [0.03, 0.04], [float("inf"), 1.0], [float("nan"), 0.0], [0.0, 0.0], [3e38, 3e38]])
    assert torch.allclose(summed(rows[:1], 1.0), torch.tensor([0.6, 0.8]), atol=1e-6)
    assert torch.equal(summed(rows[1:2], 1.0), rows[1])
    assert not summed(rows[2:5], 1.0).any()
    assert torch.linalg.vector_norm(summed(rows[5:], 1.0)) <= 1
    assert torch.allclose(summed(rows[:5], 1.0), torch.tensor([0.63, 0.84]), atol=1e-6)


def test_the_norm_of_a_long_row_is_exact_enough():
    # float32 accumulation would understate it and let the row out longer than the clip
    row = torch.rand(1, 2_000_000, generator=torch.Generator().manual_seed(0))
    assert float(squared_norms(row)) == pytest.approx(float(row.double().norm()) ** 2, rel=1e-6)
    assert float(summed(row, 1.0).double().norm()) <= 1 + 1e-6


def test_a_label_out_of_range_counts_as_no_label(model):
    images, labels, drawn = batch(model, 2)
    hidden = torch.full_like(labels, model.classes)
    for odd in (-1, 4, 10**6):
        rows = matrix(model, names(model), images, torch.full_like(labels, odd), drawn)
        assert torch.equal(rows, matrix(model, names(model), images, hidden, drawn))


def test_draws_have_their_rates_and_shapes(model):
    images = torch.rand(200, 3, 10, 10)
    drawn = draw(model, images, 10, LAW, torch.Generator().manual_seed(0), label_dropout=0.1)
    assert drawn.noise.shape == (200, 10, 3, 10, 10)
    assert len(torch.unique(drawn.noise.flatten(2)[:, :, 0])) == 2000  # no noise is shared
    # fixed seed; five standard errors, false alarm below 1e-6 under another
    assert float(drawn.drop.double().mean()) == pytest.approx(0.1, abs=5 * (0.09 / 2000) ** 0.5)


def test_only_the_parameters_given_are_differentiated(model):
    images, labels, drawn = batch(model, 2)
    chosen = {name: value for name, value in model.named_parameters() if name.endswith("attention.q.weight")}
    rows = matrix(model, chosen, images, labels, drawn)
    everything = matrix(model, names(model), images, labels, drawn)
    for name, part in unflatten(rows[3], chosen).items():
        assert torch.allclose(part, unflatten(everything[3], names(model))[name], rtol=1e-3, atol=1e-6)


class FakeCharge:
    """Draws the given batches and adds no noise: only to look at what the loop does."""

    def __init__(self, *drawn: tuple[Tensor, Tensor]) -> None:
        self.drawn, self.released = list(drawn), []

    def batches(self, size: int, draws: int = 1):
        images, labels = self.drawn.pop(0)
        yield from zip(images.split(size), labels.split(size), strict=True) if len(images) else ()

    def release(self, total: Tensor, max_norm: float, integer: bool = False) -> Tensor:
        self.released.append((total, max_norm))
        return total


def trainer(seed: int = 0, **options) -> State:
    torch.manual_seed(seed)
    model = UNet(8, 1, 4, width=8, multipliers=(1,), attention=(0,))
    config = Finetune(**{"draws": 2, "max_grad_norm": C, "learning_rate": 1e-3, "microbatch_size": 4, **options})
    return State(model, config, public_batch=16.0, autocast=False, generator=torch.Generator().manual_seed(seed))


def one_draw(count: int) -> tuple[Tensor, Tensor]:
    return torch.rand(count, 1, 8, 8), torch.randint(4, (count,))


def test_empty_draw_is_a_step():
    run = trainer()
    charge = FakeCharge(one_draw(0), one_draw(3))
    assert step(run, charge) == {"step": 1, "learning_rate": 1e-3, "noised_gradient_norm": 0.0}
    assert step(run, charge)["step"] == 2
    assert len(charge.released) == 2
    assert {norm for _, norm in charge.released} == {C}


def test_the_noise_of_a_step_is_as_long_as_announced():
    """The mean of χ² with 40 000 degrees of freedom: its standard deviation is 0.7 %; 4 % is more than five of them."""
    model = UNet(8, 1, 2, width=8, multipliers=(1,), attention=(0,))
    trainer = State(model, Finetune(max_grad_norm=0.5, steps=1, draws=1), public_batch=20.0, autocast=False)
    weights = trainer.size
    noise = (
        3.0 * 0.5 * torch.randn(weights, generator=torch.Generator().manual_seed(0))
    )  # what a charge adds to an empty draw
    assert weights > 10_000
    assert update(trainer, noise)["noised_gradient_norm"] / 0.5 == pytest.approx(
        step_noise(3.0, weights, 20.0), rel=0.04
    )


def test_the_denominator_is_public():
    # five images, denominator 16: the reported norm is that of the sum over 16
    run = trainer()
    charge = FakeCharge(one_draw(5))
    row = step(run, charge)
    assert row["noised_gradient_norm"] == pytest.approx(float(charge.released[0][0].norm()) / 16, rel=1e-5)


def test_the_step_is_adam_s():
    run = trainer()
    reference = {name: value.detach().clone().requires_grad_() for name, value in run.parameters.items()}
    adam = torch.optim.Adam(reference.values(), lr=1e-3)
    for seed in range(5):
        noised = torch.randn(run.size, generator=torch.Generator().manual_seed(seed))
        update(run, noised)
        for value, part in zip(reference.values(), unflatten(noised / 16, reference).values(), strict=True):
            value.grad = part.clone()
        adam.step()
    assert all(torch.allclose(run.parameters[name], reference[name], atol=1e-6) for name in reference)


def test_a_run_goes_on_from_its_state():
    drawn = [one_draw(9) for _ in range(4)]
    straight = trainer()
    for pair in drawn:
        step(straight, FakeCharge(pair))
    broken = trainer()
    for pair in drawn[:2]:
        step(broken, FakeCharge(pair))
    state, randomness = broken.tensors(), broken.generator.get_state()
    resumed = trainer(seed=5)
    resumed.load(state)
    resumed.generator.set_state(randomness)  # only here: in a real run the draws after a resume are fresh
    for pair in drawn[2:]:
        step(resumed, FakeCharge(pair))
    assert all(torch.equal(value, resumed.tensors()[name]) for name, value in straight.tensors().items())
    with pytest.raises(ValueError, match=r"exp_avg\."):
        resumed.load({name: value for name, value in state.items() if name != "exp_avg.conv_in.weight"})


def test_a_run_that_was_killed_goes_on_under_another_id_however_often_and_is_charged_once(owner):
    mechanism, charges, told = Mechanism(noise_multiplier=2.0, sample_rate=0.02, uses=4), [], []

    def open_charge():
        charges.append(owner.open(mechanism, stage="finetune", max_norm=0.01))
        return charges[-1]

    def run_until(last: int):
        def kill(done: int, total: int) -> None:
            if done == last:
                raise KeyboardInterrupt

        state = trainer(seed=last, checkpoint_every=1)
        return fine_tune(state, open_charge, epsilon_after=float, report=kill, say=told.append)

    for last in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            run_until(last)
        charges[-1]._lock.close()
    charge, log = run_until(-1)
    assert [row["epsilon"] for row in log] == [1, 2, 3, 4] and [row["step"] for row in log] == [1, 2, 3, 4]
    assert len(told) == 2 and all("resuming" in line for line in told)
    assert len({charge.record["id"] for charge in charges}) == 3 and owner.odometer.opened() == [charge.record]


def test_draws_are_secret():
    # neither the global seed nor anything public fixes them
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        run = State(
            UNet(8, 1, 4, width=8, multipliers=(1,), attention=()),
            Finetune(microbatch_size=4),
            public_batch=16.0,
            autocast=False,
        )
        states.append(run.generator.get_state())
    assert not torch.equal(states[0], states[1])
    assert not any("generator" in name for name in run.tensors())


def test_frozen_parameters_stay_out():
    torch.manual_seed(0)
    model = UNet(8, 1, 4, width=8, multipliers=(1,), attention=(0,))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attention" in name)
    before = {name: value.clone() for name, value in model.named_parameters()}
    run = State(model, Finetune(microbatch_size=4, draws=2), public_batch=16.0, autocast=False)
    update(run, torch.ones(run.size))
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == set(run.parameters) == set(run.ema.average)
