"""The histogram of an image's colours, without their positions: a fixed public map."""

import torch
from torch import Tensor, nn

from sfumato.data.images import Shape
from sfumato.features.scattering import block_average, block_of

LEVELS = 8  # Number of levels per channel, so that grey images have 8 colours and RGB images 512
FAINT = 1e-4  # A colour with a smaller share of the pixels hardly changes the histogram


class ColourHistogram(nn.Module):
    """Square roots of the shares of LEVELS^C colours in an image, so that small regions count more.

    (B, C, H, W) -> (B, d) with d = LEVELS^C, and a norm of about √d. A pixel counts for the colours
    near its own, weighted by distance. Images above LARGEST are averaged over blocks first, so that
    a colour counts only where it fills a block.
    """

    levels: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.block = block_of(shape)
        self.register_buffer("levels", torch.linspace(0, 1, LEVELS), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        pixels = block_average(images, self.block).flatten(2)  # (B, C, P)
        near = 1 - (pixels[..., None] - self.levels).abs() * (LEVELS - 1)
        first, *others = near.clamp(min=0).unbind(1)  # (B, P, LEVELS) each
        for other in others[:-1]:
            first = (first[..., None] * other[:, :, None]).flatten(2)
        if others:
            shares = (first.transpose(1, 2) @ others[-1]).flatten(1)
        else:
            shares = first.sum(1)
        shares = shares / pixels.shape[2]
        return ((shares + FAINT).sqrt() - FAINT**0.5) * shares.shape[1] ** 0.5
