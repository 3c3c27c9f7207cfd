"""The auxiliary generator: one step from noise and a label to an image (DP-MERF; FETA-Pro §3.3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FINEST = 8  # side of the coarsest cells, at most
FAINT = 0.1  # of the usual scale: the weights of the last layers at first
LAST = 8  # channels at full resolution, at least


class Widen(nn.Module):
    """Twice the sides: BN, ReLU, conv3, pixel shuffle. No transposed convolution, whose overlaps show as a grid."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, 4 * outputs, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(self.conv(F.relu(self.norm(x))), 2)


class Residual(nn.Module):
    """x + conv3(ReLU(BN(x)))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.relu(self.norm(x)))


class Generator(nn.Module):
    """Class-conditional convolutional generator G(z, y).

    resolution: height and width, 4 or more; channels: 1 or 3; latent: size of z ~ N(0, I); width: channels at half
    resolution, twice as many below; several: labels are 0/1 vectors. The image is the sum of a smooth one, at half
    resolution, and its details.
    """

    def __init__(
        self, resolution: int, channels: int, classes: int, latent: int = 32, width: int = 40, several: bool = False
    ) -> None:
        super().__init__()
        self.several = several
        self.resolution, self.channels, self.classes = resolution, channels, classes
        self.latent, self.width = latent, width
        start, doublings = resolution, 0
        while start > FINEST or doublings == 0:
            start, doublings = (start + 1) // 2, doublings + 1
        self.start = start
        wide = 2 * width if doublings > 1 else width
        self.stem = nn.Linear(latent + classes, wide * start * start, bias=False)
        body: list[nn.Module] = []
        for _ in range(doublings - 1):
            body += [Widen(wide, width), Residual(width)]
            wide = width
        self.body = nn.Sequential(*body, *([Residual(width)] if doublings == 1 else []))
        last = max(LAST, width // 4)
        self.widen, self.norm = Widen(width, last), nn.BatchNorm2d(last)
        self.details = nn.Conv2d(last, channels, 5, padding=2)
        self.smooth = nn.Conv2d(width, channels, 1)
        for last_layer in (self.details, self.smooth):  # it starts at grey
            nn.init.zeros_(last_layer.bias)  # type: ignore[arg-type]
            with torch.no_grad():
                last_layer.weight.mul_(FAINT)

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """z: (B, latent); labels: (B,) int64 below `classes`, or (B, classes). Returns (B, C, H, W) in [0, 1]."""
        code = torch.cat([z, (labels if self.several else F.one_hot(labels, self.classes)).to(z)], dim=1)
        hidden = self.body(self.stem(code).unflatten(1, (-1, self.start, self.start)))  # (B, width, H/2, W/2)
        details = self.details(F.relu(self.norm(self.widen(hidden)))).float()
        smooth = F.interpolate(self.smooth(hidden).float(), scale_factor=2, mode="bilinear", align_corners=False)
        return (details + smooth)[..., : self.resolution, : self.resolution].sigmoid()

    def config(self) -> dict[str, int]:
        """The arguments that rebuild this generator."""
        names = "resolution", "channels", "classes", "latent", "width", *(["several"] if self.several else [])
        return {name: getattr(self, name) for name in names}
