"""How much of a draw is computed at a time: what fits, and that no released number depends on it but by rounding."""

import pytest
import torch
from peak_memory import peak_memory
from sfumato.dpsgd.memory import (
    STEP_COPIES,
    Memory,
    choose_microbatch,
    estimate,
    gradient_memory,
    images_kept,
    kept_bytes,
    largest_microbatch,
    on_meta,
)
from torch import Tensor

from sfumato.diffusion.unet import UNet
from sfumato.dpsgd import clip, gradients, memory
from sfumato.dpsgd.clip import clipped_sum
from sfumato.dpsgd.gradients import (
    choose_chunk,
    choose_precision,
    clipped_gradient_sum,
    draw,
    mean_gradients,
    per_image_gradients,
)
from sfumato.dpsgd.run import State, gradient_sum
from sfumato.settings.dpsgd import Finetune
from sfumato.settings.noise_levels import LogNormal

B, C = 5, 0.01  # images, clip: far below the gradient norms, so every row is clipped


def network(**options) -> UNet:
    torch.manual_seed(0)
    model = UNet(8, 1, 4, **{"width": 8, "multipliers": (1, 2), "attention": (1,), **options})
    with torch.no_grad():
        for parameter in model.parameters():  # some begin at zero, and then no gradient reaches the others
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def model() -> UNet:
    return network()


def batch(model: UNet, draws: int, groups: bool = False):
    generator = torch.Generator().manual_seed(1)
    shape = (B, draws) if groups else (B,)
    images = torch.rand(*shape, model.channels, model.resolution, model.resolution, generator=generator)
    labels = torch.randint(model.classes, shape, generator=generator)
    return images, labels, draw(model, images, draws, LogNormal(), generator, label_dropout=0.2, flip=True, crop=1)


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("draws_per_pass", [1, 3, 8, 20])
def test_draws_in_parts_are_averaged_before_the_clip(model, draws_per_pass, groups):
    parameters = dict(model.named_parameters())
    images, labels, drawn = batch(model, 8, groups)
    whole, parts = (
        torch.cat([value.flatten(1) for value in rows.values()], dim=1)
        for rows in (
            per_image_gradients(model, parameters, images, labels, drawn),
            mean_gradients(model, parameters, images, labels, drawn, draws_per_pass=draws_per_pass),
        )
    )
    assert (torch.linalg.vector_norm(parts - whole, dim=1) < 1e-5 * torch.linalg.vector_norm(whole, dim=1)).all()
    sums = [
        clipped_gradient_sum(model, parameters, images, labels, drawn, C, 2, draws_per_pass=some)
        for some in (None, draws_per_pass)
    ]
    assert torch.linalg.vector_norm(sums[1] - sums[0]) < 1e-4 * C


@pytest.mark.parametrize("draws_per_pass", [1, 3])
def test_one_image_moves_the_sum_by_the_clip_where_its_draws_come_in_parts(model, draws_per_pass):
    parameters = dict(model.named_parameters())
    images, labels, drawn = batch(model, 8)
    whole = clipped_gradient_sum(model, parameters, images, labels, drawn, C, 2, draws_per_pass=draws_per_pass)
    for i in range(B):
        rest = torch.arange(B) != i
        without = clipped_gradient_sum(
            model, parameters, images[rest], labels[rest], drawn.rows(rest), C, 2, draws_per_pass=draws_per_pass
        )
        assert 0.99 * C < float(torch.linalg.vector_norm(whole - without)) <= C * (1 + 1e-5)


def test_one_broken_draw_drops_its_image_whole(model):
    parameters = dict(model.named_parameters())
    images, labels, drawn = batch(model, 4)
    drawn.noise[2, 3] = float("nan")  # of the second part
    rest = torch.arange(B) != 2
    whole = clipped_gradient_sum(model, parameters, images, labels, drawn, C, 2, draws_per_pass=2)
    without = clipped_gradient_sum(
        model, parameters, images[rest], labels[rest], drawn.rows(rest), C, 2, draws_per_pass=2
    )
    assert whole.isfinite().all()
    assert torch.linalg.vector_norm(whole - without) < 1e-4 * C


def test_as_one_matrix_rows_are_clipped_kept_or_dropped_as_apart(monkeypatch):
    random = torch.Generator().manual_seed(0)
    rows = {"a": torch.randn(6, 5, 7, generator=random), "b": torch.randn(6, 3, generator=random)}
    rows["a"][1] *= 1e-3
    rows["b"][1] *= 1e-3  # shorter than the clip: stays as it is
    rows["a"][2, 1, 1], rows["b"][3, 0], rows["b"][4, 1] = float("nan"), float("inf"), -float("inf")
    apart = clipped_sum({name: value.clone() for name, value in rows.items()}, 1.0)
    monkeypatch.setattr(clip, "one_matrix", lambda device: True)
    joint = clipped_sum({name: value.clone() for name, value in rows.items()}, 1.0)
    assert joint.isfinite().all() and torch.allclose(joint, apart, atol=1e-6)
    for i in (0, 5):
        alone = clipped_sum({name: value[i : i + 1].clone() for name, value in rows.items()}, 1.0)
        assert float(torch.linalg.vector_norm(alone)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("chunk", "draws"), [(8, 1), (4, 8)])
def test_the_memory_estimate_of_our_own_network_is_within_a_quarter_of_what_was_measured(chunk, draws):
    model = network(width=32)
    parameters, shapes = dict(model.named_parameters()), on_meta(model)
    told = gradient_memory(shapes, dict(shapes.named_parameters()), chunk, draws, STEP_COPIES)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        images, labels = torch.zeros(chunk, 1, 8, 8), torch.zeros(chunk, dtype=torch.int64)
        drawn = draw(model, images, draws, LogNormal(), generator)
        clipped_gradient_sum(model, parameters, images, labels, drawn, 1.0, chunk)

    assert told.activations + told.gradients == pytest.approx(peak_memory(step), rel=0.25)
    assert all(value.is_meta for value in shapes.parameters()) and not any(v.is_meta for v in model.parameters())
    assert told.trained == sum(value.numel() for value in parameters.values())


def linear(images: int, draws: int) -> Memory:
    """A step whose memory is plain to see: 10 bytes, and for each image 4 and 2 for each draw of it."""
    return Memory(
        weights=10, copies=0, gradients=4 * images, activations=2 * images * draws, trained=1, chunk=images,
        draws=draws, split=False,
    )  # fmt: skip


@pytest.mark.parametrize("draws", [1, 5, 32])
@pytest.mark.parametrize("budget", [0, 15, 20, 100, 1000, 10**6])
def test_what_fits_is_within_the_budget_and_twice_as_much_is_not(budget, draws):
    found = largest_microbatch(linear, draws, budget, 64)
    assert 1 <= found.chunk <= 64 and 1 <= found.draws <= draws
    assert found.peak <= budget or (found.microbatch_size, found.draws) == (1, 1)
    if found.draws < draws:  # only where one image with all of its draws is too much
        assert found.chunk == 1 and linear(1, draws).peak > budget
    elif found.chunk < 64:
        assert linear(2 * found.microbatch_size, draws).peak > budget


def test_on_a_cpu_our_own_network_takes_what_is_fast_and_on_a_gpu_what_fits(monkeypatch):
    model = network()
    parameters = dict(model.named_parameters())
    size = sum(value.numel() for value in parameters.values())
    assert choose_microbatch(model, parameters, 8, batch=64.0, copies=0) == (choose_chunk(size, 8), 8)
    assert choose_microbatch(model, parameters, 8, batch=64.0, copies=0, microbatch_size=5) == (5, 8)
    monkeypatch.setattr(model, "supports_ghost_layers", False)  # as a GPU would: by its memory
    shapes = on_meta(model)
    one = gradient_memory(shapes, dict(shapes.named_parameters()), 1, 8, 0).peak
    chosen = {}
    for name, budget, expected in (("a half", one // 2, 64.0), ("six", 6 * one, 64.0), ("all", 10**12, 16.0)):
        monkeypatch.setattr(memory, "chunk_budget", lambda where, loaded, budget=budget: budget)
        chosen[name] = choose_microbatch(model, parameters, 8, batch=expected, copies=0)
    assert chosen["a half"][0] == 1 and 1 <= chosen["a half"][1] < 8
    assert chosen["six"][0] > 1 and chosen["six"][1] == 8
    assert chosen["all"] == (8, 8)  # no chunk is filled up to more than half of a draw


@pytest.mark.parametrize("options", [{}, {"width": 32}, {"width": 32, "unshuffle": 1}, {"blocks": 2}])
def test_what_one_pass_keeps_tells_what_many_need(options):
    model = network(**options)
    shapes = on_meta(model)
    whole = gradient_memory(shapes, dict(shapes.named_parameters()), 4, 16, 0)
    assert whole.peak == pytest.approx(
        64 * kept_bytes(model, dict(model.named_parameters())) + whole.gradients, rel=0.3
    )


@pytest.mark.parametrize(
    ("passes", "expected"), [(10**6, (32, 8)), (100, (8, 8)), (31, (2, 8)), (5, (1, 5)), (0, (1, 1))]
)
def test_on_a_cpu_images_and_draws_are_fewer_where_activations_need_more_than_there_is(monkeypatch, passes, expected):
    model = network()
    parameters = dict(model.named_parameters())
    monkeypatch.setattr(memory, "KEPT_BYTES", int((passes + 0.5) * kept_bytes(model, parameters)))
    assert choose_microbatch(model, parameters, 8, batch=64.0, copies=0) == expected
    told = estimate(on_meta(model), Finetune(draws=8), 64.0)  # what a dry run says of it
    assert (told.microbatch_size, told.draws, told.split) == (*expected, expected[1] < 8)


@pytest.mark.parametrize(("room", "expected"), [(0.5, 1), (5.5, 5), (100.5, 100)])
def test_a_plain_step_holds_the_images_whose_activations_fit(monkeypatch, room, expected):
    model = network()
    monkeypatch.setattr(memory, "KEPT_BYTES", int(room * kept_bytes(model, dict(model.named_parameters()))))
    assert images_kept(model) == expected


@pytest.mark.parametrize("draws", [1, 4, 32])
@pytest.mark.parametrize("batch", [8.0, 600.0, 2048.0, 1e6])
def test_on_a_cpu_a_chunk_is_filled_up_by_little_of_a_large_batch(batch, draws):
    chunk = choose_chunk(500_000, draws, batch)
    assert chunk in (8, 64, 128) and chunk * draws <= 256
    assert chunk <= 64 or chunk * 16 <= batch


class OneDraw:
    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.drawn = images, labels

    def batches(self, size: int, draws: int):
        yield from zip(*(value.split(size) for value in self.drawn), strict=True)


def test_a_run_goes_on_with_another_chunk(model):
    """Nothing of it is kept, and the sum of the next step is the same up to rounding."""
    drawn = torch.rand(9, 1, 8, 8), torch.arange(9) % 4

    def state(**options) -> State:
        config = Finetune(draws=4, max_grad_norm=C, microbatch_size=16)
        state = State(network(), config, public_batch=16.0, autocast=False)
        state.generator = torch.Generator().manual_seed(3)  # 16 · 4 images: all in one piece, drawn alike
        for name, value in options.items():
            setattr(state, name, value)
        return state

    whole, parts = state(), state(microbatch_size=4, draws_per_pass=3)
    parts.load(whole.tensors())
    assert whole.tensors().keys() == parts.tensors().keys()
    assert not any("chunk" in name or "draws_per_pass" in name for name in whole.tensors())
    sums = [gradient_sum(some, OneDraw(*drawn)) for some in (whole, parts)]
    assert torch.linalg.vector_norm(sums[0] - sums[1]) < 1e-4 * C


@pytest.mark.parametrize("faster", [False, True])
@pytest.mark.parametrize("said", [None, False, True])
def test_the_precision_is_what_was_said_or_what_blanks_show(model, monkeypatch, said, faster):
    tried = []

    def timed(step, key, device):
        step(True), step(False)
        return faster

    def taken(model, parameters, images, labels, draws, half):
        tried.append((half, len(images), draws.levels.shape[1], bool(images.any() or labels.any())))

    monkeypatch.setattr(gradients, "is_faster", timed)
    monkeypatch.setattr(gradients, "per_image_gradients", taken)
    drawn = batch(model, 8)[2]
    answer = choose_precision(model, dict(model.named_parameters()), 4, lambda images: drawn.rows(slice(4)), 3, said)
    assert answer == (faster if said is None else said)
    assert tried == ([(True, 4, 3, False), (False, 4, 3, False)] if said is None else [])
    assert model.use_unfold is False  # of a CPU
