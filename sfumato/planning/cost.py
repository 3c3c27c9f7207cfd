"""What one pass of a network costs: its operations, written elements and calls, counted on one blank image."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sfumato.data.images import Shape
from sfumato.generators.one_step import new_generator
from sfumato.release.synthesizer import outline
from sfumato.settings.training import Model


@dataclass(frozen=True)
class Cost:
    """One pass over one image."""

    products: float  # operations of convolutions and matrix products
    elements: float = 0.0  # written ones
    calls: int = 0  # of operators, which a batch shares
    width: int = 0  # of the output

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.products + other.products, self.elements + other.elements, self.calls + other.calls)


class Counter(TorchDispatchMode):
    """Counts what a `Cost` holds."""

    products = elements = calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.products += count(*args, **(kwargs or {}), out_val=out)
        if not func.is_view:
            self.elements += sum(found.numel() for found in tree_leaves(out) if isinstance(found, Tensor))
        return out


def cost_of(network: nn.Module, *inputs: Any) -> Cost:
    """The cost of a forward pass. inputs: of one image."""
    network.eval()
    with torch.no_grad(), Counter() as counter:
        width = network(*inputs).shape[1]
    return Cost(counter.products, counter.elements, counter.calls, width)


@functools.cache
def cost_of_map(build: Callable[..., nn.Module], shape: Shape, *arguments: Any) -> Cost:
    """The cost of a map of images of `shape`, which `build` makes of the arguments."""
    return cost_of(build(*arguments), torch.zeros(1, *shape))


@functools.cache
def cost_of_generator(shape: Shape, classes: int, latent: int, width: int, block: int) -> Cost:
    """block: of the level whose image is drawn."""
    network = new_generator(shape, classes, latent, width, 0)
    return cost_of(network, torch.zeros(1, latent), torch.zeros(1, dtype=torch.int64), block)


@functools.cache
def cost_of_diffusion(model: str, shape: Shape, classes: int) -> tuple[Cost, int]:
    """The cost of our own U-Net, and the number of its weights. model: its settings as JSON."""
    network, meta = outline(Model.model_validate_json(model), shape, classes), torch.device("meta")
    labels = torch.zeros(1, dtype=torch.int64, device=meta)
    cost = cost_of(network, torch.zeros(1, *shape, device=meta), torch.zeros(1, device=meta), labels)
    return cost, sum(weight.numel() for weight in network.parameters())
