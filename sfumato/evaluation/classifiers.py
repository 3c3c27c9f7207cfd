"""The classifiers that score synthetic images: a linear softmax (`lr`), a perceptron (`mlp`), a small convolutional net (`cnn`), and three deep ones.

All take (B, C, H, W) float32 in [0, 1] and return (B, classes) logits; `features` gives what the last layer sees. `wrn`, `resnet` and
`resnext` are the networks of DPImageBench in the size "paper"; in the size "light" they are smaller ones of the same families, for a CPU.
"""

from __future__ import annotations

from torch import Tensor, nn

from sfumato.evaluation.deep_classifiers import plain_resnet, resnext, wide_resnet

DEEP = ("wrn", "resnet", "resnext")
NAMES = ("lr", "mlp", "cnn", *DEEP)
NETWORKS = {  # what the deep names stand for, by size
    "paper": {"wrn": "WRN-40-4", "resnet": "ResNet-110", "resnext": "ResNeXt-29, 8×64d"},
    "light": {"wrn": "WRN-16-2", "resnet": "ResNet-20", "resnext": "ResNeXt-20, 4×16d"},
}
FEATURES = 128  # width of the layer before the last one of `mlp` and `cnn`


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


def build_classifier(name: str, shape: tuple[int, int, int], classes: int, size: str = "light") -> Classifier:
    """A freshly initialised classifier for images of `shape` (C, H, W); `name` is one of NAMES, `size` of NETWORKS and of matter to the deep ones alone."""
    channels, height, width = shape
    pixels = channels * height * width
    if name == "lr":
        return Classifier(nn.Flatten(), pixels, classes)
    if name == "mlp":
        layers = [
            nn.Flatten(),
            nn.Linear(pixels, 2 * FEATURES),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(2 * FEATURES, FEATURES),
            nn.ReLU(),
        ]
        return Classifier(nn.Sequential(*layers), FEATURES, classes)
    if name == "cnn":
        return Classifier(convolutions(channels, height, width), FEATURES, classes)
    if name in DEEP:
        return Classifier(*deep(name, channels, min(height, width), size), classes)
    raise ValueError(f"no classifier named {name!r}: use one of {', '.join(NAMES)}")


def deep(name: str, channels: int, side: int, size: str) -> tuple[nn.Sequential, int]:
    """The body of a deep network and the width of its features. A light one reads images of 16 pixels a side and more at half resolution."""
    if size == "paper":
        return {
            "wrn": lambda: wide_resnet(channels, 40, 4),
            "resnet": lambda: plain_resnet(channels, 110),
            "resnext": lambda: resnext(channels, 29, 8, 64),
        }[name]()
    stride = 2 if side >= 16 else 1
    light = {"wrn": lambda: wide_resnet(channels, 16, 2, stride), "resnet": lambda: plain_resnet(channels, 20, stride)}
    return light[name]() if name in light else resnext(channels, 20, 4, 16, stride)


def convolutions(channels: int, height: int, width: int) -> nn.Sequential:
    """Stages of two 3×3 convolutions, batch norm and pooling, while 7 pixels a side are left, 4 stages at most, then a dense layer.

    Grey images of 16 pixels and more start at half resolution, colour keeps its own: 8×8 has 1 stage, 28×28 grey 2, 32×32 colour 3.
    """
    layers: list[nn.Module] = []
    side, depth, stage = min(height, width), channels, 0
    while stage == 0 or (side >= 7 and stage < 4):
        out = min(32 * 2**stage, 128)
        stride = 2 if stage == 0 and channels == 1 and side >= 16 else 1
        for step in (stride, 1):
            layers += [nn.Conv2d(depth, out, 3, stride=step, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            side, depth = -(-side // step), out
        if side >= 2:
            layers.append(nn.MaxPool2d(2))
        side, stage = side // 2, stage + 1
    layers += [nn.AdaptiveAvgPool2d(min(4, max(side, 1))), nn.Flatten(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(depth * min(4, max(side, 1)) ** 2, FEATURES), nn.ReLU())
