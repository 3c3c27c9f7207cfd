"""The plainest public map of an image: its pixels."""

from __future__ import annotations

from torch import Tensor, nn


class Pixels(nn.Module):
    """The image itself, flattened: (B, C, H, W) -> (B, d)."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)
