"""A network of one's own as a public map: a TorchScript file, or safetensors of an architecture of torchvision.

No file is unpickled by Python. TorchScript is a program: one that could keep something of an image, write it anywhere
or draw random numbers is refused, because the row of an image must be a function of that image.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.errors import ConfigError, DataError, explained, nearest
from sfumato.runtime.compute import device
from sfumato.storage.digest import digest_of_file
from sfumato.storage.weights import load_tensors

OWN, KNOWN = "own", ("aten::", "prim::")  # the name of this map in the parameters; PyTorch's own operations
# of a frozen program: attributes that it changes, output, files, other threads
REFUSED = {"prim::GetAttr", "prim::SetAttr", "prim::Print", "prim::fork", "aten::save", "aten::warn"}


class OwnFeatures(nn.Module):
    """(B, C, H, W) float32 in [0, 1] -> (B, d) float32: what the network makes of images, resized and normalised.

    The arguments are those of `sfumato.settings.own_network.OwnNetwork`. The network is no part of the module's state:
    its file and sha256 are. A map of features is averaged over its places. Gradients reach the images.
    Raises DataError for a missing or another file, or a network that is refused; ConfigError for its architecture.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        path: str,
        sha256: str,
        architecture: str | None = None,
        side: int | None = None,
        channels: int = 3,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        super().__init__()
        self.file, self.side, self.channels = Path(path).expanduser(), side, channels
        if not self.file.is_file() or (found := digest_of_file(self.file)) != sha256:
            problem = f"has sha256 {found}, expected {sha256}" if self.file.is_file() else "is missing"
            raise DataError(f"the network {self.file} {problem}: restore it, or name another one with its sha256")
        self.network = scripted(self.file) if architecture is None else of_torchvision(architecture, self.file)
        self.register_buffer("mean", torch.tensor([*mean])[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor([*std])[:, None, None], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        shown = images.expand(-1, self.channels, -1, -1)
        if self.side is not None:
            shown = F.interpolate(shown, (self.side, self.side), mode="bilinear", align_corners=False)
        rows = self.network(((shown - self.mean) / self.std).to(device()))
        if not isinstance(rows, Tensor) or rows.ndim not in (2, 4) or len(rows) != len(images):
            raise DataError(f"the network {self.file} must give one tensor, (B, d) or (B, d, h, w), of B images")
        return (rows.mean((2, 3)) if rows.ndim == 4 else rows).float().to(images.device)


def is_own(function: Callable[[Tensor], Tensor]) -> bool:
    """Whether a map, or the module whose method it is, looks through a network of one's own.

    No trial tells that a program never lets images of a batch see each other: each goes through it alone.
    """
    owner = getattr(function, "__self__", function)
    return isinstance(owner, nn.Module) and any(isinstance(part, OwnFeatures) for part in owner.modules())


def of_torchvision(architecture: str, file: Path) -> Callable[[Tensor], Tensor]:
    """The network of that name with the weights of a safetensors file, less its last linear layer, if it has one."""
    from torchvision import models

    if architecture not in (known := models.list_models(models)):
        raise ConfigError(f"torchvision has no architecture {architecture!r}: {nearest(architecture, known)}")
    network = models.get_model(architecture, weights=None)
    layers = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    if layers:
        parent, _, name = layers[-1].rpartition(".")
        setattr(network.get_submodule(parent), name, nn.Identity())
    with explained(DataError, lambda error: f"{file} does not hold a {architecture} ({error})", causes=(Exception,)):
        tensors = load_tensors(file)
        left_out = f"{layers[-1]}." if layers else "\0"
        network.load_state_dict({name: value for name, value in tensors.items() if not name.startswith(left_out)})
    network = network.eval().requires_grad_(False).to(device())
    return lambda images: network(images)  # type: ignore[no-any-return]


def scripted(file: Path) -> Callable[[Tensor], Tensor]:
    """The program of a TorchScript file in evaluation mode, its weights made constants.

    Guarantee: it keeps nothing from one call to the next: an attribute that it changes would be left when it is frozen.
    It runs without the optimisations that follow the first calls, after which an image could get another row.
    """
    quiet = warnings.catch_warnings(action="ignore", category=FutureWarning)  # PyTorch prefers newer forms of programs
    why = f"{file} is not TorchScript"
    with explained(DataError, lambda error: f"{why} ({type(error).__name__})", causes=(Exception,)), quiet:
        program = torch.jit.freeze(torch.jit.load(str(file), map_location=device()).eval())
    for node in nodes(program.graph):
        kind = node.kind()
        if not kind.startswith(KNOWN) or kind in REFUSED or is_random(node) or keeps_statistics(node):
            raise DataError(
                f"the network {file} uses {kind}: it could keep or show something of an image, or give it another row "
                "next time. Script it in evaluation mode without state, random numbers and output"
            )

    def run(images: Tensor) -> Tensor:
        with torch.jit.optimized_execution(False):
            return program(images)  # type: ignore[no-any-return]

    return run


def is_random(node: Any) -> bool:
    """Whether an operation draws random numbers; attention does so only if it drops some."""
    attention = node.kind() == "aten::scaled_dot_product_attention" and node.inputsAt(4).toIValue() == 0
    return bool(node.isNondeterministic()) and not attention


def keeps_statistics(node: Any) -> bool:
    """Whether a normalisation may update running statistics, which the form of the operation does not tell."""
    if node.kind() == "aten::batch_norm":
        return node.inputsAt(5).toIValue() is not False  # `training`
    return "batch_norm" in node.kind() or "instance_norm" in node.kind()


def nodes(block: Any) -> Iterator[Any]:
    """All operations of a graph, those of its inner blocks too."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from nodes(inner)
