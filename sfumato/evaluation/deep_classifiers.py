"""Three residual families that score synthetic images: wide networks, plain ResNets and ResNeXt.

Each has a stem, three stages of blocks, and an average over all places. The second and the third stage halve the sides.
Sources: Zagoruyko and Komodakis 2016 (wide), He et al. 2016 (plain), Xie et al. 2017 (ResNeXt).
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

DROPOUT = 0.3  # inside wide blocks, as DPImageBench sets it


class PreActivated(nn.Module):
    """The block of a wide network: two 3×3 convolutions, each after a batch norm and a ReLU, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first_norm, self.first = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second_norm, self.second = nn.BatchNorm2d(outputs), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs or stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.first_norm(x))
        hidden = F.dropout(F.relu(self.second_norm(self.first(active))), DROPOUT, self.training)
        return self.second(hidden) + (x if self.shortcut is None else self.shortcut(active))


class Residual(nn.Module):
    """The block of plain networks and ResNeXt: convolutions with batch norms beside a shortcut, then a ReLU.

    sizes: (kernel, output channels, groups) of each convolution; the first 3×3 one takes the stride.
    """

    def __init__(self, inputs: int, sizes: list[tuple[int, int, int]], stride: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        depth, left = inputs, stride
        for kernel, out, groups in sizes:
            step, left = (left, 1) if kernel == 3 else (1, left)
            layers += normed(depth, out, step, kernel, groups)
            depth = out
        self.layers = nn.Sequential(*layers[:-1])
        resized = inputs != depth or stride > 1
        self.shortcut = nn.Sequential(*normed(inputs, depth, stride, kernel=1)[:-1]) if resized else None

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + (x if self.shortcut is None else self.shortcut(x)))


def wide_resnet(channels: int, depth: int, widen: int, stride: int = 1) -> tuple[nn.Sequential, int]:
    """WRN-depth-widen, depth = 6n + 4; `stride`: of the stem. Returns (body, width of its features)."""
    widths = [16 * widen * 2**i for i in range(3)]
    stages = three_stages(16, widths, (depth - 4) // 6, PreActivated)
    stem = nn.Conv2d(channels, 16, 3, stride, 1, bias=False)
    return nn.Sequential(
        stem, *stages, nn.BatchNorm2d(widths[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ), widths[-1]


def plain_resnet(channels: int, depth: int, stride: int = 1) -> tuple[nn.Sequential, int]:
    """ResNet-depth of 16, 32 and 64 channels, depth = 6n + 2. Returns (body, width of its features)."""
    stages = three_stages(
        16, [16, 32, 64], (depth - 2) // 6, lambda a, b, step: Residual(a, [(3, b, 1), (3, b, 1)], step)
    )
    return nn.Sequential(*normed(channels, 16, stride), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 64


def resnext(channels: int, depth: int, cardinality: int, width: int, stride: int = 1) -> tuple[nn.Sequential, int]:
    """ResNeXt-depth, cardinality × width d, depth = 9n + 2. Returns (body, width of its features).

    A block has a bottleneck of `cardinality` groups of `width` channels, which doubles from stage to stage. Its output
    is half as wide as its bottleneck (Xie et al., the 8×64d network for CIFAR).
    """

    def block(inputs: int, outputs: int, step: int) -> Residual:
        return Residual(inputs, [(1, 2 * outputs, 1), (3, 2 * outputs, cardinality), (1, outputs, 1)], step)

    widths = [cardinality * width // 2 * 2**i for i in range(3)]
    return nn.Sequential(
        *normed(channels, 64, stride),
        *three_stages(64, widths, (depth - 2) // 9, block),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ), widths[-1]


def normed(inputs: int, outputs: int, stride: int = 1, kernel: int = 3, groups: int = 1) -> list[nn.Module]:
    """A convolution, its batch norm and a ReLU."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


def three_stages(
    depth: int, widths: list[int], blocks: int, block: Callable[[int, int, int], nn.Module]
) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for i, width in enumerate(widths):
        for j in range(blocks):
            layers.append(block(depth, width, 2 if i and not j else 1))
            depth = width
    return layers
