"""A small residual network that names images: the public classifier, from 8×8 grey to 64×64 colour."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sfumato.errors import DataError

Shape = tuple[int, int, int]  # channels, height, width

CONFIG, WEIGHTS = "config.json", "weights.safetensors"
STAGES = 4  # at most: each but the first halves the sides, until SMALLEST
SMALLEST = 4
WIDEST = 4  # times `width`
POOLED = 2  # cells a side that the head sees, so that it can tell where a stroke is


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut; stride 2 halves the sides, rounding up."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        nn.init.zeros_(self.second_norm.weight)  # the block starts as its shortcut
        shortcut: list[nn.Module] = [nn.AvgPool2d(2, ceil_mode=True)] if stride == 2 else []
        self.shortcut = nn.Sequential(
            *shortcut, *([nn.Conv2d(inputs, outputs, 1, bias=False)] if inputs != outputs else [])
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.shortcut(x) + self.second_norm(self.second(hidden)))


class ResNet(nn.Module):
    """(B, C, H, W) float32 in [0, 1] -> (B, classes) logits. In eval mode an image's logits take no part of the batch in.

    shape: (C, H, W), sides of 4 and more; width: channels of the first stage, doubled from stage to stage up to WIDEST times. Grey
    images of 16 pixels and more, and colour of 64 and more, enter at half resolution: 8×8 has 2 stages, 28×28 grey 3, 32×32 colour 4.
    """

    def __init__(self, shape: Shape, classes: int, width: int = 32) -> None:
        super().__init__()
        channels, height, width_of_image = shape
        side = min(height, width_of_image)
        if side < SMALLEST:
            raise ValueError(
                f"images of {height}×{width_of_image} are too small for the classifier: expected {SMALLEST} pixels a side or more"
            )
        self.shape, self.classes, self.width = (channels, height, width_of_image), classes, width
        stride = 2 if side >= (16 if channels == 1 else 64) else 1
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        side = -(-side // stride)
        blocks, depth = [Block(width, width)], width
        while len(blocks) < STAGES and side > SMALLEST:
            wider = min(2 * depth, WIDEST * width)
            blocks.append(Block(depth, wider, stride=2))
            side, depth = -(-side // 2), wider
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(POOLED)
        self.head = nn.Linear(depth * POOLED**2, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(self.stem(images * 2 - 1))).flatten(1))

    def config(self) -> dict:
        """The arguments that rebuild this network."""
        return {"shape": list(self.shape), "classes": self.classes, "width": self.width}


def save_resnet(model: ResNet, directory: Path) -> None:
    """Write `weights.safetensors` and `config.json` into an existing directory, each under a temporary name first."""
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()},
        directory / f"{WEIGHTS}.tmp",
    )
    (directory / f"{CONFIG}.tmp").write_text(
        json.dumps(model.config(), indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    for name in (WEIGHTS, CONFIG):
        os.replace(directory / f"{name}.tmp", directory / name)


def load_resnet(directory: Path) -> ResNet:
    """The network that `save_resnet` wrote, in eval mode. Raises DataError when files are missing or do not fit together."""
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise DataError(f"{directory} holds no classifier: {name} is missing. Run `stage classifier`")
    try:
        arguments = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        model = ResNet(tuple(arguments.pop("shape")), **arguments)
        model.load_state_dict(load_file(directory / WEIGHTS))
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(
            f"{directory}: {CONFIG} and {WEIGHTS} do not fit together ({error}): run `stage classifier` again"
        ) from error
    return model.eval()
