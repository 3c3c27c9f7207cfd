"""The histogram of an image's colours, without their positions: a fixed public map."""

import torch
from torch import Tensor, nn

from sfumato.data.images import Shape
from sfumato.features.scattering import block_average, block_of

LEVELS = 8  # Number of levels per channel: grey images have 8 colours, RGB images have 512
FAINT = 1e-4  # A colour with a smaller share of the pixels than this hardly changes the histogram


class ColourHistogram(nn.Module):
    """Histogram of the colours of an image, as square roots, so that small regions count more.

    (B, C, H, W) -> (B, d) with d = LEVELS^C colours, and a norm of about √d. A pixel counts for the
    colours near its own colour, more for nearer ones. Images with more than `scattering.LARGEST`
    pixels on the shorter side are first averaged over blocks, so that a colour counts only if it
    fills a block.
    """

    levels: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.block = block_of(shape)
        self.register_buffer("levels", torch.linspace(0, 1, LEVELS), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        pixels = block_average(images, self.block).flatten(2)  # (B, C, P)
        closeness = 1 - (pixels[..., None] - self.levels).abs() * (LEVELS - 1)
        joint, *channels = closeness.clamp(min=0).unbind(1)  # (B, P, LEVELS) each
        for channel in channels[:-1]:
            joint = (joint[..., None] * channel[:, :, None]).flatten(2)
        if channels:
            shares = (joint.transpose(1, 2) @ channels[-1]).flatten(1)
        else:
            shares = joint.sum(1)
        shares = shares / pixels.shape[2]
        return ((shares + FAINT).sqrt() - FAINT**0.5) * shares.shape[1] ** 0.5
