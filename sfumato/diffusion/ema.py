"""Exponential moving average of weights."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class EMA:
    """Average of a dict of tensors: after step t, average ← d·average + (1 − d)·value.

    d is the smaller of `decay` and (1 + t)/(10 + t), so that the initial values have little weight
    even in a short run.
    """

    decay = 0.999

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.steps = 0
        self.average = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        get_ema_multi_avg_fn(decay)(
            [*self.average.values()], [tensors[name] for name in self.average], None
        )


@torch.no_grad()
def ema_model(model: nn.Module, average: Mapping[str, Tensor]) -> None:
    """Copy averaged values into the parameters of `model`.

    average: averaged values by name. All other parameters keep their values.
    """
    for name, value in average.items():
        model.get_parameter(name).copy_(value)
