import functools
import math

import pytest
import torch
from small_network import perturbed
from torch import Tensor

from sfumato.diffusion.unet import UNet
from sfumato.settings.training import Amp, Architecture, Phase
from sfumato.training import curriculum
from sfumato.training.amp import amp_gradient, ascend
from sfumato.training.curriculum import mean_loss, warm_up

CURVATURE = torch.tensor([1.0, 4.0])  # L(θ) = Σ c·θ²/2, so ∇L = c·θ
START = torch.tensor([0.3, -0.2])
SOURCES = {
    "auxiliary": (
        torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0)),
        torch.arange(20) % 3,
    )
}


def bowl() -> Tensor:
    return START.clone().requires_grad_()


def tiny() -> UNet:
    torch.manual_seed(0)
    return perturbed(UNet(8, 1, 3, Architecture(width=8, multipliers=(1,), attention=(0,))))


def phase(**options) -> Phase:
    return Phase(
        **{"sources": {"auxiliary": 1.0}, "steps": 3, "batch": 8, "learning_rate": 2e-3, **options}
    )


@pytest.fixture(autouse=True)
def fits(monkeypatch):
    """Let any batch fit into memory.

    Otherwise, the network would get a blank image to measure its memory.
    """
    monkeypatch.setattr(curriculum, "plain_microbatch", lambda *_: 8)


def run(model: UNet, **options) -> dict[str, Tensor]:
    return warm_up(model, [phase(**options)], SOURCES, 7)


def other(radius: float = 0.2, rate: float = 0.4, steps: int = 1) -> Amp:
    """Return a perturbation with other constants."""
    made: type[Amp] = type("Other", (Amp,), {"rate": rate, "steps": steps})
    return made(radius=radius)


def inputs_of(model: UNet) -> list[list[Tensor]]:
    """Return a list to which the network's inputs are appended."""
    seen: list[list[Tensor]] = []
    model.register_forward_pre_hook(
        lambda module, inputs: seen.append([tensor.clone() for tensor in inputs])
    )
    return seen


def inside(delta: Tensor, radius: float) -> Tensor:
    """Project a perturbation on the ball, written out by hand."""
    norm = math.sqrt(float((delta.double() ** 2).sum()))
    return delta if norm <= radius else delta * (radius / norm)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(("radius", "active"), [(0.05, True), (10.0, False)])
def test_a_quadratic_loss_gives_what_the_hand_calculates(steps, radius, active, parts):
    """Two numbers are divided among one or two parameters.

    parts: number of parameters. One norm covers all of them.
    """
    theta = [part.clone().requires_grad_() for part in START.chunk(parts)]
    delta = torch.zeros(2)
    clipped = False
    amp = other(radius=radius, steps=steps)
    value = amp_gradient(theta, lambda: [(CURVATURE * torch.cat(theta) ** 2).sum() / 2], amp)
    for _ in range(steps):
        raised = delta + 0.4 * CURVATURE * (START + delta)
        delta = inside(raised, radius)
        clipped |= not torch.equal(delta, raised)
    assert clipped == active
    assert torch.allclose(
        torch.cat([part.grad for part in theta]), CURVATURE * (START + delta), rtol=1e-6
    )
    assert float(value) == pytest.approx(
        float((CURVATURE * (START + delta) ** 2).sum() / 2), rel=1e-6
    )
    assert float(value) > float((CURVATURE * START**2).sum() / 2)  # a higher loss
    assert torch.equal(torch.cat(theta), START)


@pytest.mark.parametrize(
    "amp", [Amp(), other(radius=0.01, rate=100.0, steps=4), other(radius=5.0, steps=3)]
)
def test_the_perturbation_never_leaves_the_ball(amp):
    model = tiny()
    seen = []

    def weights() -> Tensor:
        return torch.cat([value.detach().flatten().double() for value in model.parameters()])

    start = weights()
    model.register_forward_pre_hook(
        lambda module, inputs: seen.append(torch.linalg.vector_norm(weights() - start))
    )
    run(model, steps=1, amp=amp)
    assert len(seen) == amp.steps + 1
    assert seen[0] == 0 and all(norm > 0 for norm in seen[1:])
    rounding = 1e-7 * float(start.norm())  # rounding of θ + Δ in float32
    assert max(seen) <= amp.radius * (1 + 1e-6) + rounding


def test_radius_zero_is_plain_training_bit_for_bit():
    plain = tiny()
    zero = tiny()
    amp = tiny()
    averages = [run(plain), run(zero, amp=other(radius=0.0, steps=3)), run(amp, amp=Amp())]
    for name, value in plain.state_dict().items():
        assert torch.equal(value, zero.state_dict()[name]) and torch.equal(
            averages[0][name], averages[1][name]
        )
    assert any(not torch.equal(averages[0][name], averages[2][name]) for name in averages[0])


@pytest.mark.parametrize("amp", [None, other(radius=0.5, rate=3.0, steps=2)])
def test_a_batch_in_parts_has_the_gradient_of_the_batch(amp):
    shown = [
        SOURCES["auxiliary"][0],
        SOURCES["auxiliary"][1],
        torch.linspace(0.1, 2, 20),
        torch.randn(20, 1, 8, 8),
    ]
    found = {}
    for microbatch_size in (20, 7, 1, 64):
        model = tiny()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        parts = [*zip(*(tensor.split(microbatch_size) for tensor in shown), strict=True)]
        losses = functools.partial(
            map, functools.partial(mean_loss, model, autocast=False, size=20), parts
        )
        loss = amp_gradient(model.parameters(), losses, amp)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        found[microbatch_size] = torch.cat(
            [loss[None], *(value.grad.flatten() for value in model.parameters())]
        )
    for microbatch_size in (7, 1, 64):
        assert torch.allclose(found[microbatch_size], found[20], rtol=1e-3, atol=1e-5)


def test_training_keeps_only_fitting_images_in_memory(monkeypatch):
    averages = []
    for fits in (8, 3):
        monkeypatch.setattr(curriculum, "plain_microbatch", lambda *_, fits=fits: fits)
        model = tiny()
        seen = inputs_of(model)
        averages.append(warm_up(model, [phase(), phase(amp=Amp())], SOURCES, 7))
        # If three images fit, a batch of 8 is split into 3, 3 and 2
        assert {len(images) for images, *_ in seen} == ({8} if fits == 8 else {3, 2})
    for name, value in averages[0].items():
        assert torch.allclose(value, averages[1][name], atol=1e-3)


def test_an_exception_on_the_way_leaves_every_bit():
    theta = bowl()
    calls = []

    def losses() -> list[Tensor]:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return [(theta**2).sum()]

    with pytest.raises(KeyboardInterrupt):
        amp_gradient([theta], losses, Amp())
    assert torch.equal(theta, START)


def test_all_passes_of_a_step_use_the_same_draws():
    draws = {}
    for steps in (0, 2):
        model = tiny()
        draws[steps] = inputs_of(model)
        run(model, steps=4, augment=2, amp=other(steps=steps) if steps else None)
    assert len(draws[2]) == 3 * len(draws[0]) == 12
    for number, passes in enumerate(draws[2]):
        assert all(torch.equal(a, b) for a, b in zip(passes, draws[0][number // 3], strict=True))


def test_bfloat16_does_not_swallow_the_perturbation(monkeypatch):
    monkeypatch.setattr(curriculum, "prefers_bfloat16", lambda model: True)
    plain, amp = (run(tiny(), amp=amp) for amp in (None, Amp()))
    assert any(not torch.equal(plain[name], amp[name]) for name in plain)
    assert all(value.isfinite().all() for value in amp.values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_an_ascent_without_a_finite_norm_is_left_out(bad):
    before = [torch.tensor([0.1, 0.0]), torch.tensor([0.05])]
    after = ascend(before, [torch.tensor([1.0, bad]), torch.tensor([1.0])], Amp())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("curvature", [CURVATURE, 0 * CURVATURE])
def test_unused_parameters_and_flat_losses_do_not_divide_by_0(curvature):
    theta = bowl()
    idle = torch.ones(3, requires_grad=True)
    amp_gradient([theta, idle], lambda: [(curvature * theta**2).sum() / 2], Amp())
    assert not idle.grad.any() and torch.equal(idle, torch.ones(3))
    assert theta.grad.isfinite().all() and bool(theta.grad.any()) == bool(curvature.any())


def test_frozen_parameters_are_neither_moved_nor_trained():
    model = tiny()
    model.label.weight.requires_grad_(False)
    before = model.label.weight.clone()
    seen = []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(model.label.weight.clone()))
    average = run(model, amp=Amp(radius=1.0))
    assert all(torch.equal(weight, before) for weight in [*seen, model.label.weight])
    assert "label.weight" not in average
