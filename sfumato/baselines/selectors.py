"""Selectors that DP-SAPF compares with saliency: random and SynFlow. Neither reads a sensitive image or charges."""

import copy
from collections.abc import Sequence

import torch
from torch.func import functional_call

from sfumato.diffusion.denoiser import Denoiser
from sfumato.dpsgd.trainable import candidates


def public_ranking(model: Denoiser, trainable: str, seed: int) -> list[str] | None:
    """The query, key and value matrices in a random order (random-lora) or by their SynFlow score (synflow-lora).

    None for a set that is not chosen so. Equal scores stay in the order of the model.
    """
    if trainable not in ("random-lora", "synflow-lora"):
        return None
    names = candidates(model)
    if trainable == "random-lora":
        return [names[i] for i in torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()]
    scores = synflow_scores(model, names)
    return sorted(names, key=lambda name: -scores[name])


def synflow_scores(model: Denoiser, names: Sequence[str]) -> dict[str, float]:
    """Σ |∂R/∂W ⊙ W| of each named matrix. R is the summed output for an all-ones image without label.

    Every parameter enters as its absolute value; normalisations stay as they are. It uses no data, so it charges
    nothing. In float64 on the CPU, so that a run resumed elsewhere makes the same choice.
    Source: Tanaka et al. 2020 (SynFlow), one round.
    """
    linear = copy.deepcopy(model).cpu().double()
    wanted = set(names)
    weights = {name: value.detach().abs().requires_grad_(name in wanted) for name, value in linear.named_parameters()}
    ones = torch.ones(1, *model.shape, dtype=torch.float64)
    arguments = ones, torch.zeros(1, dtype=torch.float64), torch.tensor([model.classes])
    output = functional_call(linear, weights, arguments)
    gradients = torch.autograd.grad(output.sum(), [weights[name] for name in names])
    return {
        name: float((gradient * weights[name]).detach().abs().sum())
        for name, gradient in zip(names, gradients, strict=True)
    }
