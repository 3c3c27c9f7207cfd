"""A network on disk: its weights as safetensors, and a JSON file with the arguments that rebuild it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from sfumato.errors import DataError
from sfumato.files import replace_file, replacing

WEIGHTS, CONFIG = "weights.safetensors", "config.json"
N = TypeVar("N", bound=nn.Module)


def save_network(model: nn.Module, arguments: Mapping[str, Any], directory: Path, weights: str = WEIGHTS) -> None:
    """Write the weights and the arguments, each under a temporary name first."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    with replacing(directory / weights) as temporary:
        save_file(tensors, temporary)
    text = json.dumps(arguments, indent=2, sort_keys=True) + "\n"
    replace_file(directory / CONFIG, text.encode())


def load_network(directory: Path, build: Callable[..., N], stage: str, weights: str = WEIGHTS) -> N:
    """The network that `save_network` wrote. build: makes it from its arguments; stage: the one that writes it.

    Raises DataError where files are missing or do not fit together.
    """
    for name in (CONFIG, weights):
        if not (directory / name).is_file():
            raise DataError(f"{directory} holds no network: {name} is missing. Run `stage {stage}`")
    try:
        model = build(**json.loads((directory / CONFIG).read_text(encoding="utf-8")))
        model.load_state_dict(load_file(directory / weights))
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(
            f"{directory}: {CONFIG} and {weights} do not fit together ({error}): run `stage {stage}` again"
        ) from error
    return model
