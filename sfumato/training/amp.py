"""Adversarial model perturbation (AMP): descend along the gradient at the nearby weights with the
highest loss.

AMP makes a model more robust to later noise in its weights. It is used only in public training; no
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

    Here, θ are the parameters, and Δ* is a perturbation that roughly maximises L(θ + Δ) within
    ‖Δ‖₂ ≤ γ, where γ is `amp.radius`. On return, and on an exception, θ has exactly its former
    values. Without `amp`, or with γ = 0, the plain gradient ∇L(θ) is set. The caller's optimiser
    then descends from θ along `.grad`. (The plus sign of this step in RPGen's Eq. 5 is a misprint.)

    losses: function that computes L at the current values of the parameters. It yields scalars that
    add up to L, such as the losses of parts of a batch. Each scalar is differentiated before the
    next is computed. The function is called `amp.steps` + 1 times and must return the same L for
    the same parameters, so it must draw nothing at random. To use autocast, the function must enter
    it in each call, because autocast caches copies of the weights, which change between calls. If
    there are several processes, each process yields the losses of its part of the batch, and the
    results are summed over all processes.
    """
    parameters = list(parameters)
    if amp is None or amp.radius == 0:
        return descend(parameters, losses)
    weights = [parameter.detach().clone() for parameter in parameters]
    perturbation = [torch.zeros_like(weight) for weight in weights]
    try:
        for _ in range(amp.steps):
            perturbation = ascend(perturbation, loss_and_gradient(parameters, losses)[1], amp)
            put(
                parameters,
                [weight + delta for weight, delta in zip(weights, perturbation, strict=True)],
            )
        return descend(parameters, losses)
    finally:
        # Restored from a copy, because θ + Δ − Δ differs from θ in floating point
        put(parameters, weights)


def loss_and_gradient(
    parameters: Sequence[Tensor], losses: Callable[[], Iterable[Tensor]]
) -> tuple[Tensor, list[Tensor]]:
    """Compute the loss and its gradient with respect to each parameter, summed over all processes.

    The gradient is zero for a parameter that the loss does not use.
    """
    total: list[Any] = [0.0] * (1 + len(parameters))
    for loss in losses():
        parts = loss.detach(), *torch.autograd.grad(loss, parameters, materialize_grads=True)
        total = [sum(pair) for pair in zip(total, parts, strict=True)]
    value, *gradient = distributed.all_reduce(total)
    return value, gradient


def descend(parameters: Sequence[Tensor], losses: Callable[[], Iterable[Tensor]]) -> Tensor:
    value, gradient = loss_and_gradient(parameters, losses)
    for parameter, part in zip(parameters, gradient, strict=True):
        parameter.grad = part
    return value


def ascend(perturbation: Sequence[Tensor], gradient: Sequence[Tensor], amp: Amp) -> list[Tensor]:
    """Return Δ + η₁·∇L, projected to ‖Δ‖₂ ≤ γ. The norm is over all tensors together.

    η₁ is `amp.rate`, and γ is `amp.radius`. If the norm is not finite, because of a NaN or an
    overflow, Δ is returned unchanged.
    """
    raised = [delta + amp.rate * slope for delta, slope in zip(perturbation, gradient, strict=True)]
    norm = torch.stack([torch.linalg.vector_norm(delta) for delta in raised]).norm()
    shrink = (amp.radius / norm).clamp(max=1)  # γ/0 is inf, which becomes 1
    return [
        torch.where(norm.isfinite(), new * shrink, old)
        for new, old in zip(raised, perturbation, strict=True)
    ]


@torch.no_grad()
def put(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
