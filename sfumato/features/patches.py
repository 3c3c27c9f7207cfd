"""Patches of procedural textures as filters: a public map that was drawn, not trained."""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.data.images import Shape
from sfumato.data.rendered.procedural import FAMILIES, procedural_drawer
from sfumato.errors import ConfigError
from sfumato.features.scattering import block_average, block_of
from sfumato.runtime.compute import fast_bfloat16

FILTERS = 256
SIDE = 6  # Maximum side of a filter, in pixels
POOLED_CELLS = 3  # Number of cells per side of an image; the features are means over cells


class Patches(nn.Module):
    """Features that measure how similar parts of an image are to FILTERS texture patches.

    (B, C, H, W) -> (B, 2·FILTERS·POOLED_CELLS²). A response is √n times the cosine of the angle
    between a whitened patch of the image and a whitened texture patch, with n entries each.
    Responses to faint patches are reduced (see `half_norm`). Then the magnitude of every response
    is reduced by a threshold. The image is divided into POOLED_CELLS² cells. The features are the
    means over each cell: first of the responses' magnitudes, then of the signed responses. Images
    with more than `scattering.LARGEST` pixels on the shorter side are first averaged over blocks.

    Source: Thiry et al. 2021; Coates and Ng 2011 for the threshold.
    """

    positions = 32  # approximate number of positions per side at which patches are compared
    threshold = 0.5  # threshold of responses, in standard deviations of responses to white noise
    # responses to a whitened patch of this norm are halved, and responses to fainter patches are
    # reduced more
    half_norm = 1.0
    batch = 16  # number of images whose tensors fit into a CPU's caches

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.block = block_of(shape)
        self.stride = max(1, round(min(shape[1:]) / self.block / self.positions))
        side = min(SIDE, *shape[1:])
        if shape[0] * side**2 == 1:
            raise ConfigError(
                "for the feature map `patches`, the shorter side of a grey image must have 2 "
                "pixels or more: set a smaller `block`, or another map"
            )
        filters, whiten = whitened_patches(shape[0], side)
        self.filters = nn.Buffer(filters, persistent=False)
        self.whiten = nn.Buffer(whiten, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat(
            [self.cells(part) for part in block_average(images, self.block).split(self.batch)]
        )

    def cells(self, images: Tensor) -> Tensor:
        """Compute the features of images that were averaged over blocks."""
        kind = images.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=fast_bfloat16(kind)):
            whitened = F.conv2d(images, self.whiten, stride=self.stride).float()
            responses = F.conv2d(images, self.filters, stride=self.stride)
        size = torch.linalg.vector_norm(whitened, dim=1, keepdim=True) + self.half_norm
        responses = F.softshrink(
            responses * (whitened.shape[1] ** 0.5 / size).to(responses), self.threshold
        )
        # Let a be the similarity to a patch, and b the similarity to its negative.
        # Then the magnitude of the response is a + b, and the signed response is a − b.
        return (
            F.adaptive_avg_pool2d(torch.cat([responses.abs(), responses], dim=1), POOLED_CELLS)
            .flatten(1)
            .float()
        )


@cache
def whitened_patches(channels: int, side: int) -> tuple[Tensor, Tensor]:
    """Return one filter for each of FILTERS texture patches, and the filters that whiten a patch.

    The texture patches are drawn from 120 textures, whitened and scaled to norm 1. Each is then
    multiplied by the whitening matrix, which gives its filter. So one convolution both whitens the
    patches of an image and compares them with the texture patch.

    side: side of a patch, in pixels.

    Returns (FILTERS, channels, side, side) float32, and (channels·side², channels, side, side)
    float32.
    """
    random = np.random.default_rng(0)
    draw = procedural_drawer((channels, 32, 32))
    textures = np.stack([draw(random, index % len(FAMILIES)) for index in range(120)])
    unfolded = F.unfold(torch.from_numpy(textures).permute(0, 3, 1, 2).double() / 255, side)
    positions = torch.from_numpy(random.integers(unfolded.shape[2], size=192))
    patches = unfolded[:, :, positions].transpose(1, 2).flatten(0, 1)
    patches = patches - patches.mean(1, keepdim=True)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    # The floor prevents directions without variance from being amplified
    whiten = (vectors * (values + 1e-3).rsqrt()) @ vectors.T
    whiten = whiten - whiten.mean(1, keepdim=True)  # remove the effect of a patch's mean
    texture_patches = patches[patches.std(1) > 0.05]  # leave out patches with little contrast
    texture_patches = texture_patches[
        torch.from_numpy(random.choice(len(texture_patches), FILTERS, replace=False))
    ]
    filters = F.normalize(texture_patches @ whiten.T, dim=1) @ whiten
    kernels = (part.float().view(-1, channels, side, side) for part in (filters, whiten))
    return tuple(kernels)  # type: ignore[return-value]
