"""The classifiers that score synthetic images: a linear softmax (`lr`), a perceptron (`mlp`) and a small convolutional net (`cnn`).

All take (B, C, H, W) float32 in [0, 1] and return (B, classes) logits; `features` gives what the last layer sees.
"""

from __future__ import annotations

from torch import Tensor, nn

NAMES = ("lr", "mlp", "cnn")
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


def build_classifier(name: str, shape: tuple[int, int, int], classes: int) -> Classifier:
    """A freshly initialised classifier for images of `shape` (C, H, W); `name` is one of NAMES."""
    channels, height, width = shape
    pixels = channels * height * width
    if name == "lr":
        return Classifier(nn.Flatten(), pixels, classes)
    if name == "mlp":
        layers = [nn.Flatten(), nn.Linear(pixels, 2 * FEATURES), nn.ReLU(), nn.Dropout(0.2), nn.Linear(2 * FEATURES, FEATURES), nn.ReLU()]
        return Classifier(nn.Sequential(*layers), FEATURES, classes)
    if name == "cnn":
        return Classifier(convolutions(channels, height, width), FEATURES, classes)
    raise ValueError(f"no classifier named {name!r}: use one of {', '.join(NAMES)}")


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
