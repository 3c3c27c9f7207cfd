"""Adversarial model perturbation: descend by the gradient at the worst weights nearby, so that noise in the weights later hurts less.

Public training only; nothing here touches sensitive images. Source: RPGen §Stage 2, after Zheng, Zhang and Mao 2021; METHODS §6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from sfumato.config import Amp


def amp_gradient(parameters: Iterable[Tensor], loss: Callable[[], Tensor], amp: Amp | None) -> Tensor:
    """Leave ∇L(θ + Δ*) in the parameters' `.grad`, where Δ* about maximises L within ‖Δ‖₂ ≤ γ, and return L(θ + Δ*).

    parameters: θ, the leaves that the optimiser trains; loss: a scalar of the parameters' present values. It is called
    `amp.steps` + 1 times, so it must draw nothing: batch, noise levels, noise and dropped labels are drawn before. Any autocast
    is entered inside it, because autocast would keep its copies of weights that move here.
    θ is back bit for bit on return, also on an exception. No `amp`, or a radius of 0, is the plain gradient.
    The optimiser then descends at θ: the paper's Eq. 5 prints a plus.
    """
    parameters = list(parameters)
    for parameter in parameters:
        parameter.grad = None
    if amp is None or amp.radius == 0:
        value = loss()
        value.backward()
        return value.detach()
    weights = [parameter.detach().clone() for parameter in parameters]
    perturbation = [torch.zeros_like(weight) for weight in weights]
    try:
        for _ in range(amp.steps):
            gradient = torch.autograd.grad(loss(), parameters, allow_unused=True, materialize_grads=True)
            perturbation = ascend(perturbation, gradient, amp)
            put(parameters, [weight + delta for weight, delta in zip(weights, perturbation, strict=True)])
        value = loss()
        value.backward()
    finally:
        put(parameters, weights)  # a copy: θ + Δ − Δ would not be θ
    return value.detach()


def ascend(perturbation: Sequence[Tensor], gradient: Sequence[Tensor], amp: Amp) -> list[Tensor]:
    """project(Δ + η₁·∇L, ‖Δ‖₂ ≤ γ), the norm over all tensors together.

    Where that has no finite norm (a NaN, an overflow), Δ stays: the batch is then trained on with what it has, at first nothing.
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
