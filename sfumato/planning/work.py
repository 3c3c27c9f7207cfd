"""Estimate the work of each stage: the number of operations of its networks. The operations of a
network are counted once, on one blank image.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sfumato.data.images import Shape
from sfumato.settings.params import Params
from sfumato.settings.stages import QUERIES, STAGES

WRITTEN = 80  # cost of writing one number, in operations
CALL = 40_000  # cost of calling one operator, in operations
PUBLIC_CLASSES = 100  # assumed number of classes of a public set that is not prepared yet

_counted: dict[str, int] = {}


class WorkCount(TorchDispatchMode):
    """Count the operations of convolutions and matrix products, plus a fixed number of operations
    for each call of an operator and for each number that a call writes.
    """

    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations += CALL
        if not func.is_view:
            self.operations += WRITTEN * sum(
                tensor.numel() for tensor in tree_leaves(out) if isinstance(tensor, Tensor)
            )
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.operations += count(*args, **(kwargs or {}), out_val=out)
        return out


def operations_of(build: Callable[[], nn.Module], *inputs: object) -> int:
    """Build a network, and count the operations of its forward pass on one image.

    inputs: arguments of the forward pass. A tuple stands for a batch with one blank image of this
    shape.
    """
    key = repr((build, inputs))
    if key not in _counted:
        network = build().eval()
        blank = [torch.zeros(1, *each) if isinstance(each, tuple) else each for each in inputs]
        with torch.no_grad(), WorkCount() as count:
            network(*blank)
        _counted[key] = count.operations
    return _counted[key]


@dataclass(frozen=True)
class Work:
    """Numbers that determine the work of the stages.

    shape: (C, H, W) of an image; public_images: number of public images.
    """

    params: Params
    shape: Shape
    classes: int
    public_images: int = 0
    TRAINING = 3  # cost of a training step, in forward passes
    operations = staticmethod(operations_of)

    @property
    def row(self) -> int:
        """Number of operations to clip one value of a row, and to add it to the sum of a class."""
        return 4 * (self.classes + WRITTEN)

    def network(self, stage: str, block: int = 1) -> int:
        """Count the operations that a stage's network does for one image.

        block: side of the pixel blocks that the network uses, in pixels.
        """
        count = STAGES[stage].network_work
        if count is None:
            raise ValueError(f"{stage} uses no network")
        return count(self, block)

    def seen(self, query: str) -> float:
        """Return the expected number of images in all draws of a query together."""
        size = self.params.privacy.size
        sample_rate, draws = getattr(self.params, query).sampling(size)
        return size * sample_rate * draws

    def of(self, name: str) -> float | None:
        """Estimate the number of operations of a stage. Return None if it is unknown, for example
        because the stage uses a public model.

        If a query declares no work, it is assumed to read each drawn image once.
        """
        stage = STAGES[name]
        if self.params.model.directory is not None and (stage.network or name == "synthesize"):
            return None
        if stage.work is not None:
            return stage.work(self)
        if name not in QUERIES:
            return None
        if "classifier" in self.params.inputs_of(name):
            return self.network("classifier") * self.seen(name)
        return math.prod(self.shape) * self.row * self.seen(name)
