"""Write small networks, as an owner may provide them: architectures of torchvision with random
weights, in safetensors files.
"""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file

from sfumato.settings.queries import OwnNetwork

# The smallest architecture. Its last layer is a convolution, after a dropout.
ARCHITECTURE = "squeezenet1_1"


def named(path: Path, **more) -> OwnNetwork:
    return OwnNetwork(path=str(path), sha256=hashlib.sha256(path.read_bytes()).hexdigest(), **more)


def small_file(path: Path, seed: int = 0) -> OwnNetwork:
    """Write a network's weights to `path`. Returns its settings."""
    from torchvision import models

    torch.manual_seed(seed)
    save_file(models.get_model(ARCHITECTURE).state_dict(), path)
    return named(path, architecture=ARCHITECTURE, side=24)
