"""Networks on disk: weights as safetensors, and JSON with the arguments that rebuild them."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sfumato.errors import UNREADABLE, DataError, explained, passing_over
from sfumato.storage.documents import read_json
from sfumato.storage.files import replacing, write_json

WEIGHTS = "weights.safetensors"
CONFIG = "config.json"
LATENT_DIFFUSION = "latent-diffusion"  # kind of an artifact that refers to a public model
LARGEST_HEADER = 2**24  # maximum bytes of a list of tensors; a tensor takes about 100
Network = TypeVar("Network", bound=nn.Module)


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors as safetensors.

    Raises OSError if they cannot be written, or the disk is full.
    """
    try:
        save_file(dict(tensors), path, metadata)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


def save_network(
    model: nn.Module, arguments: Mapping[str, object], directory: Path, weights: str = WEIGHTS
) -> None:
    """Write the weights and the arguments, each under a temporary name first."""
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    write_json(directory / CONFIG, arguments, indent=2, sort_keys=True)
    with replacing(directory / weights) as temporary:
        save_tensors(tensors, temporary)
        # Safetensors makes the file readable only by its owner, so copy the mode of CONFIG
        temporary.chmod((directory / CONFIG).stat().st_mode)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises ValueError if the file is invalid, or contains a number that is not finite.
    """
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > LARGEST_HEADER:
        raise ValueError(f"its header claims {header:,} bytes, expected at most {LARGEST_HEADER:,}")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} contains non-finite numbers")
    return tensors


class Room(TorchFunctionMode):
    """A context that limits the total size of the tensors created in it.

    A tensor that would raise the total above `remaining` elements is not created: ValueError is
    raised instead.
    """

    def __init__(self, remaining: int) -> None:
        super().__init__()
        self.remaining = remaining

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn):
            sides = args[0] if args and isinstance(args[0], (list, tuple)) else args
            self.remaining -= math.prod(sides)
            if self.remaining < 0:
                raise ValueError(
                    f"a tensor of {tuple(sides)} has more elements than the files can contain"
                )
        return func(*args, **kwargs or {})


def load_network(
    directory: Path, build: Callable[..., Network], stage: str, weights: str = WEIGHTS
) -> Network:
    """Load the network that `save_network` wrote.

    build: constructor; stage: stage that writes the network. Raises DataError if the files do not
    match or, to limit memory use, if the number of elements in the network's tensors would exceed
    the number of bytes in the files by more than 2²⁷.
    """
    for name in (CONFIG, weights):
        if not (directory / name).is_file():
            raise DataError(
                f"{directory} contains no network: {name} is missing. Run `stage {stage}`"
            )
    with explained(
        DataError,
        lambda error: (
            f"{directory}: {CONFIG} and {weights} do not match ({error}). If you received this "
            "folder, fetch it again from its publisher. In the project that made it, run "
            f"`stage {stage}` again"
        ),
        causes=(*UNREADABLE, RuntimeError),
    ):
        with Room(2**27 + sum(file.stat().st_size for file in directory.iterdir())):
            model = build(**read_json(directory / CONFIG))
        model.load_state_dict(load_tensors(directory / weights))
    return model


def refers_to_public_model(directory: Path) -> bool:
    """Return whether the artifact refers to a public model instead of having its own weights."""
    with passing_over(*UNREADABLE):
        return bool(read_json(directory / CONFIG).get("kind") == LATENT_DIFFUSION)
    return False
