"""Choose how much of a draw to compute at a time. Except for rounding, no released number depends
on this choice.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from peak_memory import peak_memory
from pretended_gpu import GIB, pretended_gpu
from small_network import OneDraw, network
from torch import Tensor

from sfumato.diffusion.unet import UNet
from sfumato.dpsgd import microbatch
from sfumato.dpsgd.clip import clipped_sum
from sfumato.dpsgd.gradients import Microbatch, clipped_gradient_sum, draw, per_image_gradients
from sfumato.dpsgd.microbatch import activation_bytes, choose_microbatch, needed, plain_microbatch
from sfumato.dpsgd.run import State, gradient_sum
from sfumato.settings.dpsgd import Finetune
from sfumato.settings.noise_levels import LogNormal
from sfumato.settings.training import Architecture

# B images. The clip C is far below the norms of the gradients, so every row is clipped
B, C = 5, 0.01


@pytest.fixture(scope="module")
def model() -> UNet:
    return network((1,))


def batch(model: UNet, draws: int, groups: bool = False):
    generator = torch.Generator().manual_seed(1)
    shape = (B, draws) if groups else (B,)
    images = torch.rand(
        *shape, model.channels, model.resolution, model.resolution, generator=generator
    )
    labels = torch.randint(model.classes, shape, generator=generator)
    return images, labels, draw(model, images, draws, LogNormal(), generator, label_dropout=0.2)


@pytest.fixture(scope="module")
def gradients(model) -> Callable[[bool, int | None], tuple[Tensor, Tensor]]:
    """Return a function that computes the per-image gradients, and the sum of clipped gradients.

    The function computes each result only once, so tests must not change it.
    """

    @functools.cache
    def computed(groups: bool, draws_per_pass: int | None) -> tuple[Tensor, Tensor]:
        parameters = dict(model.named_parameters())
        given = batch(model, 8, groups)
        rows = per_image_gradients(model, parameters, *given, draws_per_pass=draws_per_pass)
        total = clipped_gradient_sum(model, parameters, *given, C, Microbatch(2, draws_per_pass))
        return torch.cat([value.flatten(1) for value in rows.values()], dim=1), total

    return computed


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("draws_per_pass", [1, 3, 8, 20])
def test_draws_in_parts_are_averaged_before_the_clip(gradients, draws_per_pass, groups):
    whole, total = gradients(groups, None)
    parts, sum_of_parts = gradients(groups, draws_per_pass)
    assert (
        torch.linalg.vector_norm(parts - whole, dim=1)
        < 1e-5 * torch.linalg.vector_norm(whole, dim=1)
    ).all()
    assert torch.linalg.vector_norm(sum_of_parts - total) < 1e-4 * C


@pytest.mark.parametrize(("draws_per_pass", "broken"), [(1, None), (3, None), (2, 3)])
def test_one_image_in_parts_moves_the_sum_by_the_clip(model, draws_per_pass, broken):
    """If one of an image's draws is not finite, the image adds nothing.

    broken: number of the draw of image 2 that is not finite. It is in the second part. With None,
    all draws are finite.
    """
    parameters = dict(model.named_parameters())
    images, labels, drawn = batch(model, 4)
    if broken is not None:
        drawn.noise[2, broken] = float("nan")

    def summed(which) -> Tensor:
        given = images[which], labels[which], drawn.rows(which)
        return clipped_gradient_sum(model, parameters, *given, C, Microbatch(2, draws_per_pass))

    whole = summed(torch.arange(B))
    assert whole.isfinite().all()
    for i in range(B) if broken is None else (2,):
        moved = float(torch.linalg.vector_norm(whole - summed(torch.arange(B) != i)))
        assert 0.99 * C < moved <= C * (1 + 1e-5) if broken is None else moved < 1e-4 * C


def test_as_one_matrix_rows_are_clipped_kept_or_dropped_as_apart(clip_as_one_matrix):
    random = torch.Generator().manual_seed(0)
    rows = {"a": torch.randn(6, 5, 7, generator=random), "b": torch.randn(6, 3, generator=random)}
    rows["a"][1] *= 1e-3
    rows["b"][1] *= 1e-3  # row 1 is shorter than the clip, so it is not clipped
    rows["a"][2, 1, 1], rows["b"][3, 0], rows["b"][4, 1] = (
        float("nan"),
        float("inf"),
        -float("inf"),
    )
    apart = clipped_sum({name: value.clone() for name, value in rows.items()}, 1.0)
    clip_as_one_matrix(True)
    joint = clipped_sum({name: value.clone() for name, value in rows.items()}, 1.0)
    assert joint.isfinite().all() and torch.allclose(joint, apart, atol=1e-6)
    for i in (0, 5):
        alone = clipped_sum({name: value[i : i + 1].clone() for name, value in rows.items()}, 1.0)
        assert float(torch.linalg.vector_norm(alone)) == pytest.approx(1, abs=1e-5)


@pytest.fixture
def room_of(monkeypatch) -> Callable[[float], None]:
    """Return a function that sets how many bytes are free, on any device."""
    return lambda size: monkeypatch.setattr(microbatch, "room_on", lambda *where: size)


def gradient_bytes(model: UNet) -> int:
    return 4 * sum(value.numel() for value in model.parameters())


@pytest.mark.parametrize("draws", [1, 8, 32])
@pytest.mark.parametrize("room", [0.5, 3, 30, 1000, 10**6])
def test_what_is_chosen_fits_and_is_a_power_of_two(room_of, model, draws, room):
    """room: free memory, in units of the activations of one pass."""
    parameters = dict(model.named_parameters())
    one = activation_bytes(model, parameters)
    room_of(room * one)
    images, some = choose_microbatch(model, parameters, draws, 1e6)
    assert images & (images - 1) == 0 and 1 <= some <= draws
    assert images * some <= max(1, room) and (
        images == 1 or images * gradient_bytes(model) <= room * one
    )
    if some < draws:  # draws are split only if not even one image fits with all its draws
        assert images == 1 and room < draws


@pytest.mark.parametrize("draws", [1, 4, 32])
@pytest.mark.parametrize("batch", [8.0, 600.0, 2048.0, 1e6])
def test_a_cpu_microbatch_is_fast_and_at_most_half_a_batch(model, draws, batch):
    images, some = choose_microbatch(model, dict(model.named_parameters()), draws, batch)
    assert some == draws
    assert images == (
        4 if batch == 8 else 8 if draws == 32 else 64 if draws == 4 or batch == 600 else 128
    )


@pytest.mark.parametrize(
    ("batch", "images"), [(100.0, 120), (499.0, 272), (4096.0, 470), (1e6, 500)]
)
def test_on_a_gpu_a_usual_draw_fills_its_microbatches(room_of, model, batch, images):
    """The last microbatch is filled up with copies. In microbatches of 500 images, a draw of 512
    would take twice as long as necessary.
    """
    room_of(1e12)
    parameters = dict(model.named_parameters())
    assert microbatch.estimate_microbatch(
        model, parameters, 8, batch, torch.device("cuda"), None
    ) == (images, 8)


def test_the_users_size_is_taken_unless_layers_need_fewer():
    model = network((1,))
    assert choose_microbatch(model, dict(model.named_parameters()), 8, 64.0, 5) == (5, 8)
    model.supports_ghost_layers = False
    assert choose_microbatch(model, dict(model.named_parameters()), 1, 1e6) == (32, 1)


@pytest.fixture
def chosen_on_a_gpu(monkeypatch, cuda):
    """Return a function that chooses a microbatch as on a GPU, with stand-ins on the CPU.

    The function returns the choice, as (`use_products`, images, draws), and a list of its trials,
    each as (`use_products`, passes).

    largest: number of passes that fit, by the value of `use_products`;
    fast: whether the GPU has bfloat16.
    """

    def choose(
        largest: dict[bool, int],
        draws: int = 8,
        fast: bool = True,
        requested_size: int | None = None,
    ):
        model = network((1,))
        tried = []
        monkeypatch.setattr(
            microbatch, "device_of_parameters", lambda parameters: torch.device("cuda")
        )
        monkeypatch.setattr(
            microbatch, "estimate_microbatch", lambda *asked: (asked[-1] or 512, draws)
        )
        cuda(get_device_capability=(8, 0) if fast else (7, 5))

        def fits(model, parameters, images, draws) -> bool:
            tried.append((model.use_products, images * draws))
            return images * draws <= largest[model.use_products]

        monkeypatch.setattr(microbatch, "fits", fits)
        found = choose_microbatch(model, dict(model.named_parameters()), draws, 1e6, requested_size)
        return (model.use_products, *found), tried

    return choose


@pytest.mark.parametrize(
    ("largest", "expected"), [(10**6, (512, 8)), (100, (8, 8)), (12, (1, 8)), (3, (1, 2))]
)
def test_a_gpu_size_is_halved_until_a_trial_fits(chosen_on_a_gpu, largest, expected):
    found, tried = chosen_on_a_gpu({False: 0, True: largest})
    assert found == (True, *expected)
    assert tried[0] == (True, 4096) and sorted(tried, key=lambda trial: -trial[1]) == tried


def test_without_a_fitting_size_the_other_way_is_tried(chosen_on_a_gpu):
    """cuDNN may lack a kernel for the grouped convolution, for any number of images."""
    assert chosen_on_a_gpu({False: 0, True: 1000}, fast=False)[0] == (True, 64, 8)
    assert chosen_on_a_gpu({False: 1000, True: 0})[0] == (False, 64, 8)
    with pytest.raises(MemoryError, match="one image does not fit into GPU memory"):
        chosen_on_a_gpu({False: 0, True: 0})


@pytest.mark.parametrize(
    ("draws", "fast", "products"), [(1, False, True), (8, False, False), (8, True, True)]
)
def test_products_are_taken_in_bfloat16_and_of_few_draws(chosen_on_a_gpu, draws, fast, products):
    assert chosen_on_a_gpu({False: 10**6, True: 10**6}, draws, fast)[0] == (products, 512, draws)


def test_what_the_user_asks_is_the_most_that_a_gpu_takes(chosen_on_a_gpu):
    assert chosen_on_a_gpu({False: 0, True: 10**6}, requested_size=5)[0] == (True, 5, 8)
    assert chosen_on_a_gpu({False: 0, True: 20}, requested_size=5)[0] == (True, 2, 8)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        (
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
            "non-contiguous input."
        ),
        "Unable to find a valid cuDNN algorithm to run convolution",
        "GET was unable to find an engine to execute this computation",
    ],
)
def test_missing_memory_or_kernels_are_reported_in_words(monkeypatch, model, message):
    def refused(*given):
        raise RuntimeError(text)

    monkeypatch.setattr(microbatch, "per_image_gradients", refused)
    text = message
    parameters = dict(model.named_parameters())
    assert not microbatch.fits(model, parameters, 3, 2)
    text = "Expected all tensors to be on the same device"
    with pytest.raises(RuntimeError, match=text):
        microbatch.fits(model, parameters, 3, 2)


def test_a_trial_uses_blanks_and_notices_missing_memory(monkeypatch, model):
    seen = []

    def taken(model, parameters, images, labels, draws):
        seen.append((images.shape, draws.levels.shape, bool(images.any() or labels.any())))
        if len(seen) > 1:
            raise torch.cuda.OutOfMemoryError
        return {"a": torch.zeros(3, 2)}

    monkeypatch.setattr(microbatch, "per_image_gradients", taken)
    parameters = dict(model.named_parameters())
    assert microbatch.fits(model, parameters, 3, 2) and not microbatch.fits(model, parameters, 3, 2)
    assert seen == [((3, 1, 8, 8), (3, 2), False)] * 2


@pytest.mark.parametrize("options", [{}, {"width": 32}, {"blocks": 2}])
def test_activations_of_one_pass_tell_the_memory_of_many(options):
    model = network((1,), **options)
    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        images = torch.zeros(4, 1, 8, 8)
        labels = torch.zeros(4, dtype=torch.int64)
        per_image_gradients(
            model, parameters, images, labels, draw(model, images, 16, LogNormal(), generator)
        )

    expected = 64 * activation_bytes(model, parameters) + 4 * gradient_bytes(model)
    assert expected == pytest.approx(peak_memory(step), rel=0.35)


@pytest.mark.parametrize(("room", "expected"), [(0.5, 1), (5.5, 5), (100.5, 100)])
def test_a_plain_step_holds_the_images_whose_activations_fit(room_of, model, room, expected):
    parameters = dict(model.named_parameters())
    room_of(room * activation_bytes(model, parameters))
    assert plain_microbatch(model, parameters) == expected


def test_a_line_tells_the_memory_of_an_outline_as_of_the_network(model):
    with torch.device("meta"):
        shapes = UNet(8, 1, 4, Architecture(width=8, multipliers=(1, 2), attention=(1,)))
    line = needed(shapes, dict(shapes.named_parameters()), 8, 64.0)
    assert line == needed(model, dict(model.named_parameters()), 8, 64.0)
    assert (
        line.startswith("about 0.")
        and "images at a time: 32; draws per image at a time: 8 of 8" in line
    )


def test_a_run_goes_on_with_another_microbatch(model):
    """Checkpoints do not store the size of the microbatch.

    If a run is resumed with another size, its next step computes the same sum of gradients, up to
    rounding.
    """
    drawn = torch.rand(9, 1, 8, 8), torch.arange(9) % 4

    def state(**options) -> State:
        config = Finetune(draws=4, max_grad_norm=C, microbatch_size=16)
        state = State(network((1,)), config, public_batch=16.0, autocast=False)
        # Both states make the same draws
        state.generator = torch.Generator().manual_seed(3)
        for name, value in options.items():
            setattr(state, name, value)
        return state

    whole = state()
    parts = state(microbatch_size=4, draws_per_pass=3)
    parts.load(whole.tensors())
    assert whole.tensors().keys() == parts.tensors().keys()
    assert not any("microbatch" in name or "draws_per_pass" in name for name in whole.tensors())
    sums = [gradient_sum(some, OneDraw(*drawn)) for some in (whole, parts)]
    assert torch.linalg.vector_norm(sums[0] - sums[1]) < 1e-4 * C


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("said", [None, False, True])
def test_the_precision_is_as_set_or_the_devices(model, bfloat16, said, fast):
    bfloat16(fast)
    state = State(model, Finetune(draws=2), public_batch=16.0, autocast=said)
    assert state.autocast == (fast if said is None else said)


def test_no_precision_is_taken_that_a_gpu_only_imitates(cuda):
    with pretended_gpu():
        cuda(get_device_capability=(7, 5))
        there = network((1,)).to("cuda")
        assert State(there, Finetune(draws=2), public_batch=16.0).autocast is False


@pytest.mark.parametrize("gib", [0.01, 0.05, 80])
def test_what_fits_into_a_small_gpu_is_what_its_memory_holds(gib):
    with pretended_gpu(int(gib * GIB)) as card:
        there = network((1,)).to("cuda")
        parameters = dict(there.named_parameters())
        fits = microbatch.fits(there, parameters, 128, 8)
    assert fits == (gib == 80) and card.peak > min(gib, 0.05) * GIB
