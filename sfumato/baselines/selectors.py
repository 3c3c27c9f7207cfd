"""Selectors that DP-SAPF's figures compare with saliency: random, SynFlow, a base with random unselected matrices.

None of them reads a sensitive image, so none charges anything.
"""

import copy
import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.func import functional_call

from sfumato.diffusion.denoiser import Denoiser
from sfumato.dpsgd.trainable import Ranking, candidates, flat, how_many


def public_ranking(model: Denoiser, trainable: str, seed: int) -> list[list[str]] | None:
    """The query, key and value matrices in a random order (random-lora) or by their SynFlow score (synflow-lora).

    None for a set that is not chosen so. Equal scores stay in the order of the model.
    """
    if trainable not in ("random-lora", "synflow-lora"):
        return None
    names = flat(candidates(model))
    if trainable == "random-lora":
        return [[names[i]] for i in torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()]
    scores = synflow_scores(model, names)
    return [[name] for name in sorted(names, key=lambda name: -scores[name])]


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


@torch.no_grad()
def randomise_unselected(model: nn.Module, ranking: Ranking, ratio: float, seed: int) -> None:
    """Fill the unselected matrices with values uniform in ±1/√inputs, as in a new layer (DP-SAPF Figure 4).

    Biases and norms stay. Matrices are drawn in the order of the model.
    """
    public, unselected = torch.Generator().manual_seed(seed), set(flat(ranking[how_many(ratio, len(ranking)) :]))
    for name in [name for name, _ in model.named_parameters() if name in unselected]:
        value = model.get_parameter(name)
        if value.ndim >= 2:
            value.copy_((2 * torch.rand(value.shape, generator=public) - 1) / math.sqrt(value[0].numel()))
