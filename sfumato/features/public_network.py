"""Networks that classify public images, in grey or in colour.

After training, their layers serve as public feature maps.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.data.images import Shape
from sfumato.storage.weights import load_network

SMALLEST_MAP = 4  # Blocks halve the sides until the shorter side has at most this many pixels
WIDTHS = (1, 2, 4, 4)  # Number of channels of each block, as a multiple of `width`


def shorter_side(shape: Shape, min_side: int) -> int:
    """Return the shorter side of images, in pixels. Raises ValueError if it is below `min_side`."""
    _, height, width = shape
    if min(height, width) < min_side:
        raise ValueError(
            f"images of {height}×{width} pixels are too small for the classifier: use images of "
            f"{min_side} pixels per side or more"
        )
    return min(height, width)


class PooledBlock(nn.Module):
    """Two 3×3 convolutions without a shortcut. Max pooling halves the sides, rounding down."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(
            self.second_norm(self.second(F.relu(self.first_norm(F.max_pool2d(self.first(x), 2)))))
        )


class ConvBlock(PooledBlock):
    """Two convolutions with a shortcut. Stride 2 halves the sides, rounding up."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, stride)
        nn.init.zeros_(self.second_norm.weight)  # initially, the block equals its shortcut
        self.shortcut = nn.Sequential()
        if stride == 2:
            self.shortcut.append(nn.AvgPool2d(2, ceil_mode=True))
        if inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.shortcut(x) + self.second_norm(self.second(hidden)))


class ResNet(nn.Module):
    """Residual network: (B, C, H, W) float32 in [0, 1] -> (B, classes) logits.

    In eval mode, an image's logits do not depend on the batch.

    shape: (C, H, W), with sides of 4 pixels or more;
    width: number of channels of the first stage. Stage i has width · WIDTHS[i] channels.

    The first layer halves the resolution if the shorter side has 16 pixels or more (grey images) or
    64 pixels or more (colour images). Each stage after the first halves the resolution, until the
    shorter side has at most SMALLEST_MAP pixels. There is at most one stage per entry of WIDTHS.
    """

    def __init__(self, shape: Shape, classes: int, width: int = 32) -> None:
        super().__init__()
        channels = shape[0]
        side = shorter_side(shape, SMALLEST_MAP)
        self.shape = shape
        self.classes = classes
        self.width = width
        stride = 2 if side >= (16 if channels == 1 else 64) else 1
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        side = -(-side // stride)
        depth = width
        self.blocks = nn.Sequential(ConvBlock(width, width))
        for times in WIDTHS[1:]:
            if side > SMALLEST_MAP:
                self.blocks.append(ConvBlock(depth, times * width, stride=2))
                depth = times * width
                side = -(-side // 2)
        # The head's input has 2×2 cells, so that it depends on positions
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(depth * 2**2, classes)

    def feature_map(self, images: Tensor) -> Tensor:
        """Return the last block's output: (B, C, H, W) float32 in [0, 1] -> (B, depth, h, w)."""
        return self.blocks(self.stem(images * 2 - 1))  # type: ignore[no-any-return]

    def features(self, images: Tensor) -> Tensor:
        """Return the input of the last layer: (B, C, H, W) float32 in [0, 1] -> (B, d)."""
        return self.pool(self.feature_map(images)).flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


class MaxAndMean(nn.Module):
    """The largest value and the mean of each channel: (B, C, H, W) -> (B, 2·C)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.amax((2, 3)), x.mean((2, 3))], dim=1)


class WhitenedCNN(nn.Module):
    """Shallow network on whitened patches: (B, C, H, W) float32 in [0, 1] -> (B, classes) logits.

    It trains faster than a residual network of equal accuracy. Before training, `whiten` sets the
    first layer from public images; training does not change this layer. In eval mode, an image's
    logits do not depend on the batch.

    shape: (C, H, W), with sides of 5 pixels or more (colour images) or 6 or more (grey images);
    width: number of channels of the first block. Block i has width · WIDTHS[i] channels.

    Source: Jordan 2024 (94 % on CIFAR-10 in 3.29 seconds).
    """

    def __init__(self, shape: Shape, classes: int, width: int = 64) -> None:
        super().__init__()
        channels = shape[0]
        self.shape = shape
        self.classes = classes
        self.width = width
        self.patch = 2 if channels == 3 else 3
        depth = 2 * channels * self.patch**2
        self.filters = nn.Buffer(torch.zeros(depth, channels, self.patch, self.patch))
        # Shorter side after the first layer
        side = shorter_side(shape, SMALLEST_MAP + self.patch - 1) + 1 - self.patch
        self.blocks = nn.Sequential()
        for times in WIDTHS:
            if side > SMALLEST_MAP:
                self.blocks.append(PooledBlock(depth, times * width))
                depth = times * width
                side //= 2
        self.pool = MaxAndMean()
        self.norm = nn.BatchNorm1d(2 * depth)
        self.head = nn.Linear(2 * depth, classes)

    @torch.no_grad()
    def whiten(self, images: Tensor) -> None:
        """Set the first layer from patches of public images.

        Half of the filters are the principal directions of the patches. Each direction is divided
        by the standard deviation of the patches along it. The other half are the negatives of these
        filters.
        """
        # (n, C·size²)
        patches = F.unfold(images * 2 - 1, self.patch).transpose(1, 2).flatten(0, 1).double()
        values, vectors = torch.linalg.eigh(torch.cov(patches.T))
        # The floor prevents directions without variance from being amplified.
        filters = (vectors / (values + 5e-4).sqrt()).T.reshape(-1, *self.filters.shape[1:]).flip(0)
        self.filters.copy_(torch.cat([filters, -filters]))

    def feature_map(self, images: Tensor) -> Tensor:
        """Return the last block's output: (B, C, H, W) float32 in [0, 1] -> (B, depth, h, w)."""
        images = (images * 2 - 1).contiguous(memory_format=torch.channels_last)
        return self.blocks(F.relu(F.conv2d(images, self.filters.to(images))))

    def features(self, images: Tensor) -> Tensor:
        """Return each channel's maximum and mean: (B, C, H, W) float32 in [0, 1] -> (B, d)."""
        return self.pool(self.feature_map(images))  # type: ignore[no-any-return]

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.features(images)))


PublicNetwork = ResNet | WhitenedCNN
NETWORKS: dict[str, type[ResNet] | type[WhitenedCNN]] = {
    "residual": ResNet,
    "whitened": WhitenedCNN,
}


def build_network(network: str, shape: Shape, classes: int, width: int) -> PublicNetwork:
    return NETWORKS[network]((*shape,), classes, width)  # type: ignore[arg-type]


def arguments_of(model: PublicNetwork) -> dict:
    """Return the arguments of `build_network` that rebuild `model`."""
    name = next(name for name, kind in NETWORKS.items() if isinstance(model, kind))
    return {
        "network": name,
        "shape": list(model.shape),
        "classes": model.classes,
        "width": model.width,
    }


def load_classifier(directory: Path) -> PublicNetwork:
    """Load the network that `stage classifier` wrote, in eval mode.

    Raises DataError if files are missing or damaged.
    """
    return load_network(directory, build_network, "classifier").eval()
