"""A small residual network that classifies images, from 8×8 grey to 64×64 colour: the public classifier."""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.data.images import Shape
from sfumato.weights import load_network, save_network

DEPTH = 4  # at most: each but the first halves the sides, down to SMALLEST
SMALLEST = 4
WIDEST = 4  # times `width`
POOLED = 2  # cells per side that the head sees, so it can tell where a stroke is


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut; stride 2 halves the sides, rounding up."""

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
    """(B, C, H, W) float32 in [0, 1] -> (B, classes) logits. In eval mode an image's logits do not depend on the batch.

    shape: (C, H, W), sides of 4 or more; width: channels of the first stage, doubled at each stage up to WIDEST times.
    Grey images of 16 pixels or more, and colour of 64 or more, enter at half resolution: 8×8 has 2 stages, 28×28 grey
    3, 32×32 colour 4.
    """

    def __init__(self, shape: Shape, classes: int, width: int = 32) -> None:
        super().__init__()
        channels, height, width_of_image = shape
        side = min(height, width_of_image)
        if side < SMALLEST:
            raise ValueError(
                f"images of {height}×{width_of_image} are too small for the classifier: "
                f"expected {SMALLEST} pixels a side or more"
            )
        self.shape, self.classes, self.width = (channels, height, width_of_image), classes, width
        stride = 2 if side >= (16 if channels == 1 else 64) else 1
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        side = -(-side // stride)
        blocks, depth = [Block(width, width)], width
        while len(blocks) < DEPTH and side > SMALLEST:
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


def save_classifier(model: ResNet, directory: Path) -> None:
    """Write `weights.safetensors` and `config.json`."""
    save_network(model, model.config(), directory)


def load_classifier(directory: Path) -> ResNet:
    """The network that `save_classifier` wrote, in eval mode. Raises DataError when files are missing or damaged."""
    return load_network(directory, ResNet, "classifier").eval()
