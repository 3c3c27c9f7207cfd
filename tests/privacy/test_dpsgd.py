"""The sensitivity of the DP-SGD sum, on a real network with attention."""

import pytest
import torch
from cases import GivenCharge, drawn_images
from dpsgd_runs import CLIP, check_clip, check_rows, matrix, trainer
from small_network import perturbed
from torch import Tensor

from sfumato.diffusion.unet import UNet
from sfumato.dpsgd.clip import clipped_sum, squared_norms, unflatten
from sfumato.dpsgd.gradients import Draws, Microbatch, clipped_gradient_sum, draw
from sfumato.dpsgd.run import State, step, step_noise, update
from sfumato.errors import ConfigError
from sfumato.settings.dpsgd import Finetune
from sfumato.settings.noise_levels import TimestepMixture
from sfumato.settings.training import Architecture

# B images. The clip C is far below the norms of the gradients, so every row is clipped
B, C = 6, 0.01
LAW = TimestepMixture()


@pytest.fixture(scope="module")
def model() -> UNet:
    torch.manual_seed(0)
    # The two levels have sides of 5 and 3 pixels
    return perturbed(
        UNet(10, 3, 4, Architecture(width=8, multipliers=(1, 2), attention=(0, 1), unshuffle=2))
    )


def batch(model: UNet, draws: int, count: int = B):
    generator = torch.Generator().manual_seed(0)
    side = model.resolution
    images = torch.rand(count, model.channels, side, side, generator=generator)
    labels = torch.randint(model.classes, (count,), generator=generator)
    return images, labels, draw(model, images, draws, LAW, generator, label_dropout=0.2)


def summed(rows: Tensor, max_norm: float) -> Tensor:
    return clipped_sum({"a": rows.clone()}, max_norm)


def names(model: UNet) -> dict[str, Tensor]:
    return dict(model.named_parameters())


@pytest.mark.parametrize("draws", [1, 8])
def test_per_image_gradients_equal_a_loops(model, draws):
    images, labels, drawn = batch(model, draws)
    shown = torch.where(drawn.drop, model.classes, labels[:, None])
    check_rows(model, names(model), (images, labels, drawn), lambda i: shown[i])


@pytest.mark.parametrize("draws", [1, 8])
def test_gradients_of_several_labels_equal_a_loops(draws):
    """Test images with none, one, two and all of the labels. If a row of labels has entries other
    than 0 and 1, its image is treated as unlabelled.
    """
    torch.manual_seed(0)
    model = UNet(8, 1, 4, Architecture(width=8, multipliers=(1,), attention=(0,)), several=True)
    torch.nn.init.normal_(model.conv_out.weight)
    images, _, drawn = batch(model, draws)
    labels = torch.tensor(
        [[0] * 4, [0, 1, 0, 0], [1, 0, 1, 0], [1] * 4, [1, 255, 0, 0], [0, 0, 0, 1]]
    ).to(torch.uint8)

    def shown(i: int) -> Tensor:
        return model.hidden(labels[i].expand(draws, -1), drawn.drop[i] | (i == 4))

    check_rows(model, names(model), (images, labels, drawn), shown)


def test_the_draws_of_an_image_are_averaged_before_the_clip(model):
    images, labels, drawn = batch(model, 8)
    apart = [
        Draws(**{name: value[:, k : k + 1] for name, value in vars(drawn).items()})
        for k in range(8)
    ]
    each = [matrix(model, names(model), images, labels, one) for one in apart]
    total = clipped_gradient_sum(model, names(model), images, labels, drawn, C, Microbatch(4))
    averaged_first = summed(torch.stack(each).mean(0), C)
    clipped_first = sum(summed(rows, C) for rows in each)
    assert torch.allclose(total, averaged_first, atol=1e-4 * C)
    assert torch.linalg.vector_norm(total - clipped_first) > C  # so a wrong order is found


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("chunk", "autocast"), [(1, False), (3, False), (64, False), (3, True)])
@pytest.mark.parametrize("draws", [1, 8])
def test_one_image_moves_the_sum_by_at_most_the_clip(model, draws, chunk, autocast, layout):
    images, labels, drawn = batch(model, draws, count=4)
    check_clip(
        model, names(model), (images.to(memory_format=layout), labels, drawn), C, chunk, autocast
    )


def test_channels_last_inputs_change_nothing():
    torch.manual_seed(0)
    model = UNet(8, 3, 4, Architecture(width=8, multipliers=(1, 1), attention=(1,)))
    torch.nn.init.normal_(model.conv_out.weight)
    images, labels, drawn = batch(model, 2)
    rows = matrix(model, names(model), images, labels, drawn)
    nhwc = images.to(memory_format=torch.channels_last)
    model.to(memory_format=torch.channels_last)
    again = matrix(model, names(model), nhwc, labels, drawn)
    assert torch.allclose(again, rows, atol=1e-4 * float(rows.norm(dim=1).max()))


def test_a_row_is_clipped_or_kept_or_dropped():
    rows = torch.tensor(
        [
            [3.0, 4.0],
            [0.03, 0.04],
            [float("inf"), 1.0],
            [float("nan"), 0.0],
            [0.0, 0.0],
            [3e38, 3e38],
        ]
    )
    assert torch.allclose(summed(rows[:1], 1.0), torch.tensor([0.6, 0.8]).double(), atol=1e-5)
    assert torch.equal(summed(rows[1:2], 1.0), rows[1].double())
    assert not summed(rows[2:5], 1.0).any()
    assert torch.linalg.vector_norm(summed(rows[5:], 1.0)) <= 1
    assert torch.allclose(summed(rows[:5], 1.0), torch.tensor([0.63, 0.84]).double(), atol=1e-5)


def test_the_norm_of_a_long_row_is_exact_enough():
    # float32 accumulation would understate the norm, and the clipped row would exceed the clip
    row = torch.rand(1, 2_000_063, generator=torch.Generator().manual_seed(0))  # no multiple of RUN
    assert float(squared_norms(row)) == pytest.approx(float(row.double().norm()) ** 2, rel=1e-6)
    assert float(summed(row, 1.0).norm()) <= 1


def awkward_rows(length: int) -> dict[str, Tensor]:
    """Return vectors whose norm is easily understated in float32, by description."""
    random = torch.Generator().manual_seed(length)
    mixed = torch.randn(length, generator=random) * 10 ** (
        8 * torch.rand(length, generator=random) - 4
    )
    late = torch.full((length,), 1e-4)
    late[::64] = 1.0  # in float32, the small squares after each 1 vanish in the sum
    return {
        "equal": torch.ones(length),
        "equal, not a power of two": torch.full((length,), 0.3),
        "equal, large": torch.full((length,), 1e15),
        "equal, short": torch.full((length,), 1.001 * C / length**0.5),
        "mixed": mixed,
        "mixed, the largest first": mixed.abs().sort(descending=True).values,
        "small after large": late,
        "just above a half": torch.full((length,), 1 + 2.0**-12),
        "normal": torch.randn(length, generator=random),
        "one": torch.nn.functional.one_hot(torch.tensor(length // 2), length).float() * 3,
    }


@pytest.mark.parametrize("bound", [1e-8, C, 1.0, 2.0**0.5, 1e6])
@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 4096, 5003, 1_000_003])
def test_a_row_of_any_length_is_within_the_clip_to_the_last_bit(length, bound, clip_as_one_matrix):
    rows = torch.stack([*awkward_rows(length).values()])
    for fused in (False, True) if length == 5003 else (False,):
        clip_as_one_matrix(fused)
        for name, row in zip(awkward_rows(length), rows, strict=True):
            norm = float(torch.linalg.vector_norm(summed(row[None], bound)))
            assert norm <= bound, name
            full = min(float(row.double().norm()), bound)
            # The row is hardly shorter than allowed
            assert norm >= 0.9999 * full * full / (full + 1e-6), name


def test_a_sum_over_many_rows_moves_by_the_clip_and_no_rounding():
    """The total is in float64. In float32, rounding over 2000 nearly parallel rows would exceed the
    margin FLOAT32_SLACK, by which rows are clipped below C.
    """
    rows = 1 + 0.1 * torch.rand(2000, 500, generator=torch.Generator().manual_seed(0))
    whole = summed(rows, C)
    for i in range(0, 2000, 100):
        kept = torch.arange(2000) != i
        assert torch.linalg.vector_norm(whole - summed(rows[kept], C)) <= C


def test_non_finite_weights_end_the_run_at_the_first_step():
    state = trainer()
    with pytest.raises(ConfigError, match="after step 1.*: lower learning_rate or max_grad_norm"):
        update(state, torch.full((state.size,), 1e300, dtype=torch.float64))


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
    # The tolerance is five standard errors. The seed is fixed; with another one, the false-alarm
    # rate is below 1e-6.
    assert float(drawn.drop.double().mean()) == pytest.approx(0.1, abs=5 * (0.09 / 2000) ** 0.5)


def test_empty_draw_is_a_step_and_the_denominator_is_public():
    run = trainer()
    charge = GivenCharge([drawn_images(0), drawn_images(5)])
    assert step(run, charge) == {"step": 1, "learning_rate": 1e-3, "noised_gradient_norm": 0.0}
    row = step(run, charge)
    assert row["step"] == 2 and [norm for _, norm in charge.seen] == [CLIP] * 2
    assert row["noised_gradient_norm"] == pytest.approx(
        float(charge.seen[1][0].norm()) / 16, rel=1e-5
    )


def test_the_noise_of_a_step_is_as_long_as_announced():
    """The norm of 6 000 normals has a standard deviation of 0.9 %.

    The tolerance of 5 % is more than five of them.
    """
    run = trainer()
    # The noise of an empty draw
    noise = 3.0 * CLIP * torch.randn(run.size, generator=torch.Generator().manual_seed(0))
    assert run.size > 6_000
    assert update(run, noise)["noised_gradient_norm"] / CLIP == pytest.approx(
        step_noise(3.0, run.size, 16.0), rel=0.05
    )


def test_the_step_is_adam_s():
    run = trainer()
    reference = {
        name: value.detach().clone().requires_grad_() for name, value in run.parameters.items()
    }
    adam = torch.optim.Adam(reference.values(), lr=1e-3)
    for seed in range(5):
        noised = torch.randn(run.size, generator=torch.Generator().manual_seed(seed))
        update(run, noised)
        for value, part in zip(
            reference.values(), unflatten(noised / 16, reference).values(), strict=True
        ):
            value.grad = part.clone()
        adam.step()
    assert all(
        torch.allclose(run.parameters[name], reference[name], atol=1e-6) for name in reference
    )


def test_draws_are_secret():
    """Neither the global seed nor anything public fixes the draws."""
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        run = State(
            UNet(8, 1, 4, Architecture(width=8)),
            Finetune(microbatch_size=4),
            public_batch=16.0,
            autocast=False,
        )
        states.append(run.generator.get_state())
    assert not torch.equal(states[0], states[1])


def test_frozen_parameters_stay_out():
    torch.manual_seed(0)
    model = UNet(8, 1, 4, Architecture(width=8, multipliers=(1,), attention=(0,)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attention" in name)
    before = {name: value.clone() for name, value in model.named_parameters()}
    run = State(model, Finetune(microbatch_size=4, draws=2), public_batch=16.0, autocast=False)
    update(run, torch.ones(run.size))
    changed = {
        name for name, value in model.named_parameters() if not torch.equal(value, before[name])
    }
    assert changed == set(run.parameters) == set(run.ema.average)
