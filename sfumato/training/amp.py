"""Adversarial model perturbation (AMP): descend by the gradient at the worst weights nearby.

Later noise in the weights then hurts less. Public training only; nothing here touches sensitive images.
Source: RPGen §Stage 2, after Zheng, Zhang and Mao 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from sfumato.runtime import distributed
from sfumato.settings.training import Amp


def amp_gradient(parameters: Iterable[Tensor], losses: Callable[[], Iterable[Tensor]], amp: Amp | None) -> Tensor:
    """Put ∇L(θ + Δ*) in the parameters' `.grad` and return L(θ + Δ*). Δ* roughly maximises L within ‖Δ‖₂ ≤ γ.

    On return, and on an exception, θ has its old bits. Without `amp`, or with radius 0, this is the plain gradient.
    The optimiser then descends at θ: the paper's Eq. 5 prints a plus. With many processes, each has the losses of its
    own part of the batch, and all add up to that of the whole.

    losses: scalars of the parameters' current values that add up to L, such as those of parts of a batch: each is
    differentiated before the next is taken. It runs `amp.steps` + 1 times, so it must draw nothing at random. Enter
    autocast inside it: autocast caches copies of weights, and the weights move here.
    """
    parameters = list(parameters)
    if amp is None or amp.radius == 0:
        return descend(parameters, losses)
    weights = [parameter.detach().clone() for parameter in parameters]
    perturbation = [torch.zeros_like(weight) for weight in weights]
    try:
        for _ in range(amp.steps):
            _, found = slope(parameters, losses)
            gradient = [
                torch.zeros_like(weight) if part is None else part for weight, part in zip(weights, found, strict=True)
            ]
            perturbation = ascend(perturbation, gradient, amp)
            put(parameters, [weight + delta for weight, delta in zip(weights, perturbation, strict=True)])
        return descend(parameters, losses)
    finally:
        put(parameters, weights)  # from the copy: θ + Δ − Δ is not θ in floating point


def slope(parameters: Sequence[Tensor], losses: Callable[[], Iterable[Tensor]]) -> tuple[Tensor, list[Tensor | None]]:
    """The loss and its gradient by parameter, added up over all processes; None for one that the loss does not see."""
    values: list[Tensor] = []
    found: list[Tensor | None] = [None] * len(parameters)
    for value in losses():
        values.append(value.detach())
        more = torch.autograd.grad(value, parameters, allow_unused=True)
        found = [plus(*both) for both in zip(found, more, strict=True)]
    value, *sums = distributed.all_reduce([torch.stack(values).sum(), *(part for part in found if part is not None)])
    rest = iter(sums)
    return value, [None if part is None else next(rest) for part in found]


def plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Sum of two optional tensors."""
    return other if one is None else one if other is None else one + other


def descend(parameters: Sequence[Tensor], losses: Callable[[], Iterable[Tensor]]) -> Tensor:
    """Put the gradient in the parameters' `.grad` and return the loss."""
    value, gradient = slope(parameters, losses)
    for parameter, part in zip(parameters, gradient, strict=True):
        parameter.grad = part
    return value


def ascend(perturbation: Sequence[Tensor], gradient: Sequence[Tensor], amp: Amp) -> list[Tensor]:
    """project(Δ + η₁·∇L, ‖Δ‖₂ ≤ γ), the norm over all tensors together.

    If the norm is not finite (a NaN, an overflow), Δ stays unchanged: zero at the first step.
    """
    raised = [delta + amp.rate * slope for delta, slope in zip(perturbation, gradient, strict=True)]
    norm = torch.stack([torch.linalg.vector_norm(delta) for delta in raised]).norm()
    shrink = (amp.radius / norm).clamp(max=1)  # γ/0 is inf, so 1
    return [torch.where(norm.isfinite(), new * shrink, old) for new, old in zip(raised, perturbation, strict=True)]


@torch.no_grad()
def put(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Overwrite the parameters, bit for bit."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
