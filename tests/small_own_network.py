"""Small networks of one's own: architectures of torchvision with random weights in safetensors."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file

from sfumato.settings.queries import OwnNetwork

# The smallest; its last layer is a convolution, and a dropout comes before it
ARCHITECTURE = "squeezenet1_1"


def named(path: Path, **more) -> OwnNetwork:
    return OwnNetwork(path=str(path), sha256=hashlib.sha256(path.read_bytes()).hexdigest(), **more)


def small_file(path: Path, seed: int = 0) -> OwnNetwork:
    """Writes the weights to `path`."""
    from torchvision import models

    torch.manual_seed(seed)
    save_file(models.get_model(ARCHITECTURE).state_dict(), path)
    return named(path, architecture=ARCHITECTURE, side=24)
