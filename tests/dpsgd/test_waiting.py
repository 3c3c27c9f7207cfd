"""Find operations that would make a step wait for a GPU, by running the step on a CPU."""

from typing import Any

import pytest
import torch
from small_network import OneDraw
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sfumato.diffusion import unet
from sfumato.diffusion.unet import GroupNorm, UNet
from sfumato.dpsgd.run import State, gradient_sum
from sfumato.settings.dpsgd import Finetune
from sfumato.settings.noise_levels import LogNormal, TimestepMixture
from sfumato.settings.training import Architecture

# Operations that wait for a GPU, because the program needs their result, or because the size of
# their result depends on the content of a tensor
WAITS = {
    f"aten::{name}"
    for name in (
        *(
            "_local_scalar_dense",
            "item",
            "is_nonzero",
            "equal",
            "nonzero",
            "nonzero_numpy",
            "masked_select",
        ),
        *("_unique2", "unique_dim", "bincount", "repeat_interleave.Tensor"),
    )
}
SENDS = "aten::lift_fresh"  # makes a tensor from Python numbers, and sends it to the GPU


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple = (), keywords: dict | None = None
    ) -> Any:
        name = operator._schema.name
        assert name not in WAITS and name != SENDS, name
        # The size of an index by booleans depends on their values
        if name in ("aten::index", "aten::index_put", "aten::index_put_"):
            assert not any(
                isinstance(part, Tensor) and part.dtype == torch.bool
                for part in tree_leaves(arguments[1])
            )
        return operator(*arguments, **(keywords or {}))


def one_draw(count: int) -> OneDraw:
    return OneDraw(torch.rand(count, 1, 10, 10), torch.arange(count) % 4)


def state(law: Any, **options: Any) -> State:
    torch.manual_seed(0)
    model = UNet(10, 1, 4, Architecture(width=8, multipliers=(1, 2), attention=(1,), unshuffle=2))
    config = Finetune(
        **{"draws": 4, "max_grad_norm": 0.01, "microbatch_size": 4, "noise_levels": law, **options}
    )
    return State(
        model, config, public_batch=16.0, autocast=False, generator=torch.Generator().manual_seed(0)
    )


@pytest.mark.parametrize("law", [LogNormal(), TimestepMixture()])
@pytest.mark.parametrize("draws_per_pass", [4, 2])
def test_nothing_in_the_sum_of_a_draw_waits_for_a_gpu(clip_as_one_matrix, law, draws_per_pass):
    clip_as_one_matrix(True)
    run = state(law)
    charge = one_draw(7)
    run.draws_per_pass = draws_per_pass
    gradient_sum(run, charge)  # the first step creates what later steps reuse
    with NoWaiting():
        total = gradient_sum(run, charge)
    assert total.isfinite().all() and total.any()


def test_what_waits_is_noticed(monkeypatch):
    """On a CPU, the clip searches for broken rows and waits for the result, so the check must fail
    here. If the clip did the same on a GPU, the test above would fail.
    """
    run = state(LogNormal())
    charge = one_draw(3)
    with pytest.raises(AssertionError, match="nonzero"), NoWaiting():
        gradient_sum(run, charge)
    with pytest.raises(AssertionError), NoWaiting():
        charge.images[charge.labels == 1]
    with pytest.raises(AssertionError, match="lift_fresh"), NoWaiting():
        torch.tensor([0.5, 1.0])


class OnGpu(Tensor):
    """A tensor on the processor that claims to be on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize("most", [2, 5, 7, 100])
def test_group_norm_in_parts_has_equal_numbers_and_derivatives(monkeypatch, most):
    torch.manual_seed(0)
    norm = GroupNorm(16)
    given = torch.randn(7, 16, 5, 3)
    assert norm.groups == 4
    scale = torch.randn(7, 16)
    shift = torch.randn(7, 16)
    monkeypatch.setattr(unet, "MOST_GROUPS", 4 * most)

    def found(kind: type[Tensor]) -> list[Tensor]:
        inputs = [value.clone().requires_grad_() for value in (given, scale, shift)]
        x = inputs[0].as_subclass(kind)
        out = norm(x, *inputs[1:]).as_subclass(Tensor)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

    sizes = []
    inner = unet.normalised
    monkeypatch.setattr(
        unet, "normalised", lambda x, *rest: sizes.append(len(x)) or inner(x, *rest)
    )
    whole = found(Tensor)
    assert sizes == [7]
    parts = found(OnGpu)
    assert max(sizes[1:]) == min(most, 7) and sum(sizes[1:]) == 7
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
