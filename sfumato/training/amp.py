"""Adversarial model perturbation (AMP): descend along the gradient at the nearby weights with the
highest loss.

It makes the model more robust to later noise in its weights. It is used in public training only; no
function here reads sensitive images.

Source: RPGen §Stage 2, after Zheng, Zhang and Mao 2021.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sfumato.runtime import distributed
from sfumato.settings.training import Amp


def amp_gradient(
    parameters: Iterable[Tensor], losses: Callable[[], Iterable[Tensor]], amp: Amp | None
) -> Tensor:
    """Set the parameters' `.grad` to ∇L(θ + Δ*), and return L(θ + Δ*).

    Δ* roughly maximises L within ‖Δ‖₂ ≤ γ. On return, and on an exception, θ is restored exactly.
    Without `amp`, or with radius 0, this is the plain gradient. The optimiser then descends from θ;
    the plus in the paper's Eq. 5 is a misprint. With many processes, each gets the losses of its
    part of the batch, and the result is the total.

    losses: scalars of the parameters' current values that add up to L, such as losses of parts of a
    batch. Each is differentiated before the next is computed. It is called `amp.steps` + 1 times,
    so it must draw nothing at random. Enter autocast inside it: autocast caches copies of weights,
    and these change between calls.
    """
    parameters = list(parameters)
    if amp is None or amp.radius == 0:
        return descend(parameters, losses)
    weights = [parameter.detach().clone() for parameter in parameters]
    perturbation = [torch.zeros_like(weight) for weight in weights]
    try:
        for _ in range(amp.steps):
            perturbation = ascend(perturbation, slope(parameters, losses)[1], amp)
            put(
                parameters,
                [weight + delta for weight, delta in zip(weights, perturbation, strict=True)],
            )
        return descend(parameters, losses)
    finally:
        put(parameters, weights)  # restored from the copy: θ + Δ − Δ is not θ in floating point


def slope(
    parameters: Sequence[Tensor], losses: Callable[[], Iterable[Tensor]]
) -> tuple[Tensor, list[Tensor]]:
    """Compute the loss and its gradient by parameter, summed over all processes.

    A parameter that the loss does not use gets zeros.
    """
    total: list[Any] = [0.0] * (1 + len(parameters))
    for loss in losses():
        parts = loss.detach(), *torch.autograd.grad(loss, parameters, materialize_grads=True)
        total = [sum(both) for both in zip(total, parts, strict=True)]
    value, *gradient = distributed.all_reduce(total)
    return value, gradient


def descend(parameters: Sequence[Tensor], losses: Callable[[], Iterable[Tensor]]) -> Tensor:
    value, gradient = slope(parameters, losses)
    for parameter, part in zip(parameters, gradient, strict=True):
        parameter.grad = part
    return value


def ascend(perturbation: Sequence[Tensor], gradient: Sequence[Tensor], amp: Amp) -> list[Tensor]:
    """Compute project(Δ + η₁·∇L, ‖Δ‖₂ ≤ γ), the norm over all tensors together.

    If the norm is not finite (a NaN, an overflow), Δ stays unchanged: zero at the first step.
    """
    raised = [delta + amp.rate * slope for delta, slope in zip(perturbation, gradient, strict=True)]
    norm = torch.stack([torch.linalg.vector_norm(delta) for delta in raised]).norm()
    shrink = (amp.radius / norm).clamp(max=1)  # γ/0 is inf, so 1
    return [
        torch.where(norm.isfinite(), new * shrink, old)
        for new, old in zip(raised, perturbation, strict=True)
    ]


@torch.no_grad()
def put(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
