"""The auxiliary generator: one step from noise and a label to an image, without a discriminator.

Source: DP-MERF; FETA-Pro §3.3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Generator(nn.Module):
    """Class-conditional convolutional generator G(z, y).

    resolution: height and width, 4 or more; channels: 1 or 3; latent: size of z ~ N(0, I); width: channels of the last
    hidden layer.
    """

    def __init__(self, resolution: int, channels: int, classes: int, latent: int = 60, width: int = 32) -> None:
        super().__init__()
        self.resolution, self.channels, self.classes, self.latent, self.width = (
            resolution,
            channels,
            classes,
            latent,
            width,
        )
        start, doublings = resolution, 0
        while start > 8 or doublings == 0:
            start, doublings = (start + 1) // 2, doublings + 1
        self.start = start
        wide = width * 2 ** min(doublings, 2)
        self.stem = nn.Linear(latent + classes, wide * start * start, bias=False)
        layers: list[nn.Module] = [nn.BatchNorm2d(wide), nn.ReLU()]
        for _ in range(doublings):
            narrow = max(wide // 2, width)
            layers += [
                nn.ConvTranspose2d(wide, narrow, 4, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(narrow),
                nn.ReLU(),
            ]
            wide = narrow
        layers += [nn.Conv2d(wide, channels, 3, padding=1)]
        self.body = nn.Sequential(*layers)

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """z: (B, latent); labels: (B,) int64 below `classes`. Returns (B, C, H, W) in [0, 1]."""
        code = torch.cat([z, F.one_hot(labels, self.classes).to(z)], dim=1)
        hidden = self.stem(code).unflatten(1, (-1, self.start, self.start))  # (B, wide, start, start)
        return self.body(hidden)[..., : self.resolution, : self.resolution].float().sigmoid()

    def config(self) -> dict[str, int]:
        """The arguments that rebuild this generator."""
        return {name: getattr(self, name) for name in ("resolution", "channels", "classes", "latent", "width")}
