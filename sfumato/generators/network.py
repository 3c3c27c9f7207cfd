"""The auxiliary generator: one step from noise and a label to an image (DP-MERF; FETA-Pro §3.3)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.data.images import Shape
from sfumato.settings.fields import Size, both_sides, size_of

# The coarse image has at most COARSE² pixels: a square one has sides of at most COARSE pixels.
# Each further level doubles the sides.
COARSE = 32


class NormConv(nn.Module):
    """Batch normalisation (BN) and a 3×3 convolution (conv3), which subclasses combine."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)


class Widen(NormConv):
    """Layer that doubles the sides: BN, ReLU, conv3, pixel shuffle.

    A transposed convolution would leave a visible grid where its kernels overlap.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(self.conv(F.relu(self.norm(x))), 2)


class GeneratorBlock(NormConv):
    """Residual block: x + conv3(ReLU(BN(x)))."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.relu(self.norm(x)))


class Enlarge(NormConv):
    """Layer that doubles the sides: BN, ReLU, bilinear interpolation, conv3.

    In large images, a pixel shuffle would leave a visible grid.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(enlarged(F.relu(self.norm(x))))  # type: ignore[no-any-return]


class GeneratorLevel(nn.Module):
    """Level of the generator, which doubles the sides of an image and adds details.

    The input is the image, (B, channels, H, W), and the features from which the image was computed,
    (B, inputs, H, W). The output is the image, and `outputs` features, at twice the resolution.
    """

    def __init__(self, inputs: int, outputs: int, channels: int) -> None:
        super().__init__()
        self.enlarge = Enlarge(inputs, outputs)
        self.residual = GeneratorBlock(outputs, outputs)
        self.norm = nn.BatchNorm2d(outputs)
        self.details = nn.Conv2d(outputs, channels, 5, padding=2)
        nn.init.zeros_(self.details.bias)  # type: ignore[arg-type]
        with torch.no_grad():
            self.details.weight.mul_(0.1)

    def forward(self, image: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.residual(self.enlarge(hidden))
        return enlarged(image) + self.details(F.relu(self.norm(hidden))).float(), hidden


def cut(planes: Tensor, sides: tuple[int, int]) -> Tensor:
    return planes[..., : sides[0], : sides[1]]


def half(sides: tuple[int, int]) -> tuple[int, int]:
    """Halve both sides, rounding up."""
    return (sides[0] + 1) // 2, (sides[1] + 1) // 2


def enlarged(planes: Tensor) -> Tensor:
    """Double the sides by bilinear interpolation."""
    return F.interpolate(planes, scale_factor=2, mode="bilinear", align_corners=False)


class Generator(nn.Module):
    """Class-conditional convolutional generator G(z, y).

    The generator first draws a coarse image with at most COARSE² pixels. To do so, it draws a
    smooth image at half the coarse image's resolution, enlarges it, and adds details. Each level
    then doubles the sides of the image and adds finer details, until the image has its full
    resolution.

    resolution: see `Denoiser`; sides of 4 pixels or more;
    channels: 1 or 3;
    latent: size of z ~ N(0, I);
    width: number of feature channels at half the coarse image's resolution. If the first layer's
    resolution is lower than that, the first layer has 2·width channels;
    several: whether labels are vectors of 0 and 1.
    """

    def __init__(
        self,
        resolution: Size,
        channels: int,
        classes: int,
        latent: int = 32,
        width: int = 40,
        several: bool = False,
    ) -> None:
        super().__init__()
        self.several = several
        self.resolution = size_of(resolution)
        self.channels = channels
        self.classes = classes
        self.shape: Shape = (channels, *both_sides(resolution))
        self.latent = latent
        self.width = width
        self.sides = [self.shape[1:]]  # (height, width) after each level, finest level first
        while math.prod(self.sides[-1]) > COARSE**2:
            self.sides.append(half(self.sides[-1]))
        self.start = half(self.sides[-1])
        doublings = 0  # how many layers of the body double the height and the width
        while math.prod(self.start) > 8**2:  # the body starts from 8×8 cells or fewer
            self.start = half(self.start)
            doublings += 1
        body_width = 2 * width if doublings else width
        self.stem = nn.Linear(latent + classes, body_width * math.prod(self.start), bias=False)
        self.body = nn.Sequential() if doublings else nn.Sequential(GeneratorBlock(width, width))
        for _ in range(doublings):
            self.body.extend([Widen(body_width, 4 * width), GeneratorBlock(width, width)])
            body_width = width
        if len(self.sides) == 1:
            last = max(8, width // 4)
            self.widen: nn.Module = Widen(width, 4 * last)
        else:
            last = 1024 // COARSE  # channels of a level: 1024 / side, but at least 8
            self.widen = Enlarge(width, last)
        self.norm = nn.BatchNorm2d(last)
        self.details = nn.Conv2d(last, channels, 5, padding=2)
        self.smooth = nn.Conv2d(width, channels, 1)
        for last_layer in (self.details, self.smooth):  # before training, images are nearly grey
            nn.init.zeros_(last_layer.bias)  # type: ignore[arg-type]
            with torch.no_grad():
                last_layer.weight.mul_(0.1)
        self.levels = nn.ModuleList()
        for sides in self.sides[-2::-1]:
            finer = max(8, 1024 // math.isqrt(math.prod(sides)))
            self.levels.append(GeneratorLevel(last, finer, channels))
            last = finer

    def forward(self, z: Tensor, labels: Tensor, block: int = 1) -> Tensor:
        """Draw images with values in [0, 1].

        z: (B, latent);
        labels: (B,) int64 below `classes` or, for several labels, (B, classes);
        block: one of `blocks`. With 1, images have the full resolution. With a larger value, the
        last levels are left out, and images are smaller: each pixel represents block×block pixels
        of the full image.

        Returns (B, C, ceil(H/block), ceil(W/block)).
        """
        if not self.several:
            labels = F.one_hot(labels, self.classes)
        code = torch.cat([z, labels.to(z)], dim=1)
        hidden = self.body(self.stem(code).unflatten(1, (-1, *self.start)))  # (B, width, H/2, W/2)
        smooth = enlarged(self.smooth(hidden).float())
        hidden = self.widen(hidden)
        image = smooth + self.details(F.relu(self.norm(hidden))).float()
        image, hidden = (cut(part, self.sides[-1]) for part in (image, hidden))
        levels = self.levels[: len(self.levels) + 1 - block.bit_length()]
        for level, sides in zip(levels, self.sides[-2::-1], strict=False):
            image, hidden = (cut(part, sides) for part in level(image, hidden))
        return image.sigmoid()

    @property
    def blocks(self) -> tuple[int, ...]:
        """Possible values of the argument `block` of `forward`.

        The first value gives the coarse image, and each further value the image after one more
        level. With the value b, each pixel represents b×b pixels of the full image.
        """
        return tuple(2**level for level in range(len(self.levels), -1, -1))

    def config(self) -> dict[str, int]:
        """Return the arguments that rebuild this generator."""
        names = ["resolution", "channels", "classes", "latent", "width"]
        if self.several:
            names.append("several")
        return {name: getattr(self, name) for name in names}
