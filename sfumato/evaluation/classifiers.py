"""The classifiers that score synthetic images: a linear one, a perceptron, three small CNNs and three deep networks.

All take (B, C, H, W) float32 in [0, 1] and return (B, classes) logits; `features` returns the input of the last layer.
`wrn`, `resnet` and `resnext` are small networks of the families that DPImageBench scores with. A new classifier is one
entry of CLASSIFIERS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from sfumato.evaluation.deep_classifiers import normed, plain_resnet, resnext, wide_resnet
from sfumato.features.public_network import MaxAndMean, PooledBlock

FEATURES = 128  # width of the layer before the last one of `mlp` and `cnn`
Body = tuple[nn.Module, int]  # images (B, C, H, W) in [-1, 1] -> (B, width), and the width


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One classifier.

    body: (channels, height, width) of the images -> body; network: the name of a deep network, "" for the others;
    augment: training images are shifted a little, and colour ones mirrored.
    """

    body: Callable[[int, int, int], Body]
    peak_learning_rate: float
    weight_decay: float
    network: str = ""
    augment: bool = False


CLASSIFIERS: dict[str, Spec] = {
    "lr": Spec(
        body=lambda channels, height, width: (nn.Flatten(), channels * height * width),
        peak_learning_rate=1e-2,
        weight_decay=1e-4,
    ),
    "mlp": Spec(
        body=lambda channels, height, width: (perceptron(channels * height * width), FEATURES),
        peak_learning_rate=2e-3,
        weight_decay=1e-4,
    ),
    "cnn": Spec(
        body=lambda channels, height, width: (convolutions(channels, height, width), FEATURES),
        peak_learning_rate=4e-3,
        weight_decay=1e-2,
    ),
    "student": Spec(
        body=lambda channels, height, width: pooled_convolutions(channels, height, width),
        peak_learning_rate=4e-3,
        weight_decay=1e-2,
        augment=True,
    ),
    "wrn": Spec(
        body=lambda channels, height, width: wide_resnet(channels, 16, 2, stem_stride(height, width)),
        peak_learning_rate=4e-3,
        weight_decay=1e-2,
        network="WRN-16-2",
    ),
    "resnet": Spec(
        body=lambda channels, height, width: plain_resnet(channels, 20, stem_stride(height, width)),
        peak_learning_rate=4e-3,
        weight_decay=1e-2,
        network="ResNet-20",
    ),
    "resnext": Spec(
        body=lambda channels, height, width: resnext(channels, 20, 4, 16, stem_stride(height, width)),
        peak_learning_rate=2e-3,
        weight_decay=1e-2,
        network="ResNeXt-20, 4×16d",
    ),
}
NAMES = tuple(CLASSIFIERS)
DEEP = tuple(name for name, spec in CLASSIFIERS.items() if spec.network)


class Classifier(nn.Module):
    """A body that maps images to features, and a linear head."""

    def __init__(self, body: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, classes)

    def features(self, images: Tensor) -> Tensor:
        """(B, C, H, W) float32 in [0, 1] -> (B, width) float32."""
        return self.body(images * 2 - 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


def build_classifier(name: str, shape: tuple[int, int, int], classes: int) -> Classifier:
    """A freshly initialised classifier, one of NAMES, for images of `shape` (C, H, W)."""
    if name not in CLASSIFIERS:
        raise ValueError(f"no classifier named {name!r}: use one of {', '.join(NAMES)}")
    body, width = CLASSIFIERS[name].body(*shape)
    return Classifier(body, width, classes)


def stem_stride(height: int, width: int) -> int:
    """Deep networks read images of 16 pixels a side and more at half resolution."""
    return 2 if min(height, width) >= 16 else 1


def perceptron(pixels: int) -> nn.Sequential:
    """Two dense layers with a dropout between them."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(pixels, 2 * FEATURES),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(2 * FEATURES, FEATURES),
        nn.ReLU(),
    )


def pooled_convolutions(channels: int, height: int, width: int) -> Body:
    """A convolution and up to four blocks that each halve the side, down to 4: 32×32 has 3. Returns (body, width)."""
    blocks: list[nn.Module] = []
    depth, side = 32, min(height, width)
    while side >= 8 and len(blocks) < 4:
        out = min(48 * 2 ** len(blocks), 192)
        blocks.append(PooledBlock(depth, out))
        side, depth = side // 2, out
    return nn.Sequential(*normed(channels, 32), *blocks, MaxAndMean(), nn.Dropout(0.2)), 2 * depth


def convolutions(channels: int, height: int, width: int) -> nn.Sequential:
    """Stages of two 3×3 convolutions, batch norms and a pooling, then a dense layer.

    There are 1 to 4 stages; another one follows while the shorter side has 7 pixels or more. Grey images of 16 pixels a
    side and more start at half resolution: 8×8 has 1 stage, 28×28 grey 2, 32×32 colour 3.
    """
    layers: list[nn.Module] = []
    side, depth, stage = min(height, width), channels, 0
    while stage == 0 or (side >= 7 and stage < 4):
        out = min(32 * 2**stage, 128)
        stride = 2 if stage == 0 and channels == 1 and side >= 16 else 1
        for step in (stride, 1):
            layers += normed(depth, out, step)
            side, depth = -(-side // step), out
        if side >= 2:
            layers.append(nn.MaxPool2d(2))
        side, stage = side // 2, stage + 1
    layers += [nn.AdaptiveAvgPool2d(min(4, max(side, 1))), nn.Flatten(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(depth * min(4, max(side, 1)) ** 2, FEATURES), nn.ReLU())
