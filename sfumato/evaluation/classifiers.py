"""Classifiers that score synthetic images.

The module contains a linear classifier, a perceptron, two small CNNs and three deep networks. Each
takes images, (B, C, H, W) float32 in [0, 1], and returns logits, (B, classes). The deep networks
are small versions of the architectures that DPImageBench uses.

Source: Zagoruyko and Komodakis 2016 (wide), He et al. 2016 (plain), Xie et al. 2017 (ResNeXt).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.features.public_network import MaxAndMean, PooledBlock

PENULTIMATE_WIDTH = 128  # Width of the last hidden layer of `mlp` and `cnn`
# A module that maps images, (B, C, H, W) in [-1, 1], to features, (B, width); and its width
Body = tuple[nn.Module, int]


@dataclass(frozen=True)
class Spec:
    """A classifier's body and training.

    body: function that builds the body for (channels, height, width); augment: whether to shift
    images a little during training, and to mirror colour images.
    """

    body: Callable[[int, int, int], Body]
    peak_learning_rate: float
    weight_decay: float
    augment: bool = False


CLASSIFIERS: dict[str, Spec] = {
    "lr": Spec(lambda c, h, w: (nn.Flatten(), c * h * w), 1e-2, 1e-4),
    "mlp": Spec(lambda c, h, w: (perceptron(c * h * w), PENULTIMATE_WIDTH), 2e-3, 1e-4),
    "cnn": Spec(lambda c, h, w: (convolutions(c, h, w), PENULTIMATE_WIDTH), 4e-3, 1e-2),
    "student": Spec(lambda c, h, w: pooled_convolutions(c, h, w), 4e-3, 1e-2, augment=True),
    "wrn": Spec(lambda c, h, w: wide_resnet(c, 16, 2, stem_stride(h, w)), 4e-3, 1e-2),
    "resnet": Spec(lambda c, h, w: plain_resnet(c, 20, stem_stride(h, w)), 4e-3, 1e-2),
    "resnext": Spec(lambda c, h, w: resnext(c, 20, 4, 16, stem_stride(h, w)), 2e-3, 1e-2),
}


class Classifier(nn.Module):
    """A body that maps images to features, and a linear head."""

    def __init__(self, body: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, classes)

    def features(self, images: Tensor) -> Tensor:
        """Compute features: (B, C, H, W) float32 in [0, 1] -> (B, width) float32."""
        return self.body(images * 2 - 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


def build_classifier(name: str, shape: tuple[int, int, int], classes: int) -> Classifier:
    """Build a new classifier, one of CLASSIFIERS, for images of `shape` (C, H, W)."""
    body, width = CLASSIFIERS[name].body(*shape)
    return Classifier(body, width, classes)


def stem_stride(height: int, width: int) -> int:
    """Return the stride of a deep network's stem: 2 for sides of 16 pixels or more, else 1."""
    return 2 if min(height, width) >= 16 else 1


def perceptron(pixels: int) -> nn.Sequential:
    first = nn.Flatten(), nn.Linear(pixels, 2 * PENULTIMATE_WIDTH), nn.ReLU(), nn.Dropout(0.2)
    return nn.Sequential(*first, nn.Linear(2 * PENULTIMATE_WIDTH, PENULTIMATE_WIDTH), nn.ReLU())


def pooled_convolutions(channels: int, height: int, width: int) -> Body:
    """Build a convolution and up to four blocks. Each block halves the sides.

    Blocks are added while the shorter side has 8 pixels or more, so images of 32×32 pixels get
    three blocks. Returns (body, feature width).
    """
    blocks: list[nn.Module] = []
    depth = 32
    side = min(height, width)
    while side >= 8 and len(blocks) < 4:
        out = min(48 * 2 ** len(blocks), 192)
        blocks.append(PooledBlock(depth, out))
        depth = out
        side //= 2
    return nn.Sequential(*normed(channels, 32), *blocks, MaxAndMean(), nn.Dropout(0.2)), 2 * depth


def convolutions(channels: int, height: int, width: int) -> nn.Sequential:
    """Build a CNN of 1 to 4 stages and a dense layer.

    A stage has two 3×3 convolutions with batch norms. It ends with a pooling layer if the shorter
    side has 2 pixels or more. After the first stage, stages are added while the shorter side has 7
    pixels or more.

    Grey images with a shorter side of 16 to 32 pixels start at half resolution. If the shorter side
    has more than 32 pixels, strided convolutions first halve it until it has at most 32.
    """
    layers: list[nn.Module] = []
    side = min(height, width)
    stride = 2 if channels == 1 and 16 <= side <= 32 else 1
    depth = channels
    out = 8
    while side > 32:
        layers += normed(depth, out, 2)
        side = math.ceil(side / 2)
        depth = out
        out = min(2 * out, 32)
    for out in (32, 64, 128, 128):
        if out > 32 and side < 7:
            break
        layers += [*normed(depth, out, stride), *normed(out, out)]
        side = math.ceil(side / stride)
        if side >= 2:
            layers.append(nn.MaxPool2d(2))
        side //= 2
        depth = out
        stride = 1
    side = min(4, max(side, 1))
    layers += [nn.AdaptiveAvgPool2d(side), nn.Flatten(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(depth * side**2, PENULTIMATE_WIDTH), nn.ReLU())


# --- deep networks: a stem, then three stages of blocks, then an average over all positions.
# The second and the third stage halve the sides.


class PreActivated(nn.Module):
    """The block of a wide network: a norm before each of two 3×3 convolutions, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first_norm = nn.BatchNorm2d(inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = (
            nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            if inputs != outputs or stride > 1
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.first_norm(x))
        # Dropout as in DPImageBench.
        hidden = F.dropout(F.relu(self.second_norm(self.first(active))), 0.3, self.training)
        return self.second(hidden) + (x if self.shortcut is None else self.shortcut(active))


class Residual(nn.Module):
    """A residual block: convolutions with batch norms, added to a shortcut, and a ReLU.

    sizes: (kernel size, output channels, groups) of each convolution.
    """

    def __init__(self, inputs: int, sizes: list[tuple[int, int, int]], stride: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        depth = inputs
        strided = [kernel for kernel, _, _ in sizes].index(3)
        for i, (kernel, out, groups) in enumerate(sizes):
            layers += normed(depth, out, stride if i == strided else 1, kernel, groups)
            depth = out
        self.layers = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Sequential()  # an empty shortcut is the identity
        if inputs != depth or stride > 1:
            self.shortcut.extend(normed(inputs, depth, stride, kernel=1)[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


def wide_resnet(channels: int, depth: int, widen: int, stride: int = 1) -> Body:
    """Build the wide network WRN-`depth`-`widen`, and return (body, feature width).

    depth: 6n + 4 for some n; stride: stride of the stem.
    """
    widths = [16 * widen * 2**i for i in range(3)]
    stages = three_stages(16, widths, (depth - 4) // 6, PreActivated)
    stem = nn.Conv2d(channels, 16, 3, stride, 1, bias=False)
    return averaged(stem, *stages, nn.BatchNorm2d(widths[-1]), nn.ReLU()), widths[-1]


def plain_resnet(channels: int, depth: int, stride: int = 1) -> Body:
    """Build ResNet-`depth` with 16, 32 and 64 channels, and return (body, feature width).

    depth: 6n + 2 for some n.
    """

    def block(inputs: int, outputs: int, step: int) -> Residual:
        return Residual(inputs, [(3, outputs, 1), (3, outputs, 1)], step)

    stages = three_stages(16, [16, 32, 64], (depth - 2) // 6, block)
    return averaged(*normed(channels, 16, stride), *stages), 64


def resnext(channels: int, depth: int, cardinality: int, width: int, stride: int = 1) -> Body:
    """Build ResNeXt-`depth`, and return (body, feature width). depth: 9n + 2 for some n.

    In the first stage, the bottleneck of a block has `cardinality` groups of `width` channels. The
    number of channels doubles from stage to stage. The output of a block has half as many channels
    as its bottleneck, as in the 8×64d network for CIFAR of Xie et al.
    """

    def block(inputs: int, outputs: int, step: int) -> Residual:
        return Residual(
            inputs, [(1, 2 * outputs, 1), (3, 2 * outputs, cardinality), (1, outputs, 1)], step
        )

    widths = [cardinality * width // 2 * 2**i for i in range(3)]
    return averaged(
        *normed(channels, 64, stride), *three_stages(64, widths, (depth - 2) // 9, block)
    ), widths[-1]


def averaged(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def normed(
    inputs: int, outputs: int, stride: int = 1, kernel: int = 3, groups: int = 1
) -> list[nn.Module]:
    """Return a convolution, its batch norm and a ReLU."""
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
