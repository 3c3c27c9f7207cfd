"""Wavelet scattering: a public map with fixed filters, without learned parts."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.data.images import Shape

LARGEST = 64  # Maximum shorter side, in pixels; larger images are replaced by their block means


class Filtered(torch.autograd.Function):
    """Convolution of planes with fixed filters of odd size, with zeros around the planes.

    (N, 1, H, W), (F, 1, size, size) -> (N, F, H, W). Only the planes have a gradient.

    The backward pass convolves each row of the gradient with every row of the filters. This gives
    `size` results, one per row of the filters. The results are shifted vertically and added up. On
    a CPU, PyTorch's own backward pass for a single channel would take four times as long.
    """

    @staticmethod
    def forward(ctx: Any, planes: Tensor, filters: Tensor) -> Tensor:
        ctx.save_for_backward(filters)
        return F.conv2d(planes, filters, padding=filters.shape[-1] // 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (filters,) = ctx.saved_tensors
        size = filters.shape[-1]
        height = gradient.shape[2]
        kernels = filters.flip(3)[:, 0].permute(1, 0, 2)[:, :, None]  # (size, F, 1, size)
        rows = F.conv2d(gradient, kernels.to(gradient), padding=(0, size // 2))  # (N, size, H, W)
        total = torch.zeros_like(rows[:, 0], dtype=torch.promote_types(rows.dtype, torch.float32))
        total = F.pad(total, (0, 0, size // 2, size // 2))
        for row in range(size):
            total[:, row : row + height] += rows[:, row]
        return total[:, None, size // 2 : size // 2 + height], None


class Scattering(nn.Module):
    """Wavelet-scattering coefficients with fixed Morlet filters, scaled to norm √d.

    (B, C, H, W) -> (B, d). The zeroth order is the image, averaged over cells of 2^scales pixels
    per side. The first order is |image * ψ_θ| for 8 angles θ at each of `scales` octaves, averaged
    over the same cells. For the next octave, the sides of the image are halved. Images with more
    than LARGEST pixels on the shorter side are first averaged over blocks.

    Source: Bruna and Mallat 2013.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.block = block_of(shape)
        side = min(shape[1:]) // self.block
        self.scales = 1 + (side >= 16) + (side >= 48)
        self.filters = nn.Buffer(morlet(8), persistent=False)  # (16, 1, 7, 7)
        axis = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
        self.blur = nn.Buffer(torch.outer(axis, axis)[None, None], persistent=False)

    def halve(self, planes: Tensor) -> Tensor:
        return F.conv2d(planes, self.blur.to(planes), stride=2, padding=2)

    def moduli(self, planes: Tensor) -> Tensor:
        """Compute |plane * ψ_θ| for each of N planes: (N, 1, H, W) -> (N, 8, H, W)."""
        real, imaginary = Filtered.apply(planes, self.filters.to(planes)).chunk(2, dim=1)
        # The added constant makes the gradient exist at zero
        return (real.square() + imaginary.square() + 1e-6).sqrt() - 1e-3

    def orders(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the zeroth and the first order, and the moduli of the finest octave.

        The two orders are (B, d) with different d; the moduli are not averaged over cells.
        """
        plane = block_average(images, self.block).flatten(0, 1)[:, None]  # (B·C, 1, H, W)
        zeroth = block_average(plane, 2**self.scales).reshape(len(images), -1)
        first = []
        finest = moduli = self.moduli(plane)
        for octave in range(self.scales):
            if octave:
                plane = self.halve(plane)
                moduli = self.moduli(plane)
            first.append(
                block_average(moduli, 2 ** (self.scales - octave)).reshape(len(images), -1)
            )
        return zeroth, torch.cat(first, dim=1), finest

    def forward(self, images: Tensor) -> Tensor:
        zeroth, first, _ = self.orders(images)
        return to_root_norm(torch.cat([zeroth, first], dim=1), 1e-3)


class DeepScattering(Scattering):
    """Wavelet scattering up to the second order, in three weighted blocks.

    (B, C, H, W) -> (B, d) rows of norm √d. The first two blocks are the orders of `Scattering`. For
    the third block, the moduli of the finest octave are averaged to half the resolution and
    filtered again, each at all angles. Each block is centred, scaled to norm 1 and multiplied by
    its weight.

    Source: Bruna and Mallat 2013; Tramèr and Boneh 2021 for learning on it under differential
    privacy.
    """

    WEIGHTS = (0.35, 0.65, 0.675)  # weights of the three orders

    def forward(self, images: Tensor) -> Tensor:
        zeroth, first, finest = self.orders(images)
        coarse = block_average(finest, 2).flatten(0, 1)[:, None]
        second = block_average(self.moduli(coarse), 2 ** (self.scales - 1)).reshape(len(images), -1)
        blocks = zeroth, first, second
        row = torch.cat(
            [weight * unit(block) for weight, block in zip(self.WEIGHTS, blocks, strict=True)],
            dim=1,
        )
        return row * math.sqrt(row.shape[1] / sum(weight**2 for weight in self.WEIGHTS))


class Moduli(Scattering):
    """Local energies of an image: |image * ψ_θ| at the finest octave, averaged over cells.

    (B, C, H, W) -> (B, d) with d = 8·C·ceil(H/cell)·ceil(W/cell) and norm below √d: a row r is
    scaled to √d · r / (‖r‖ + 1), so that faint images stay faint.

    cell: side of a cell, in pixels. It is 2 if the shorter side of the image is below 48 pixels. In
    larger images, the shorter side has 16 to 21 cells.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.cell = max(2, min(shape[1:]) // 16)

    def forward(self, images: Tensor) -> Tensor:
        plane = images.flatten(0, 1)[:, None]
        return to_root_norm(
            block_average(self.moduli(plane), self.cell).reshape(len(images), -1), 1
        )


class Pixels(nn.Module):
    """The pixels of an image: (B, C, H, W) -> (B, d).

    If the shorter side has more than LARGEST pixels, the block means of the image are returned
    instead.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.block = block_of(shape)

    def forward(self, images: Tensor) -> Tensor:
        return block_average(images, self.block).flatten(1)


def block_of(shape: Shape) -> int:
    """Return the side of the blocks, in pixels, over which images of this shape are averaged.

    This side is the smallest power of two that gives at most LARGEST blocks on the shorter side of
    an image.
    """
    return 2 ** max(0, math.ceil(math.log2(min(shape[1:]) / LARGEST)))


def block_average(planes: Tensor, size: int, across: int = 0) -> Tensor:
    """Average blocks of size×size pixels; blocks at an edge may be smaller.

    (N, C, H, W) -> (N, C, ceil(H/size), ceil(W/size)). across: number of columns of a block, if it
    differs from `size`.

    If a gradient is needed and all blocks have the same size, each group of `size` rows is
    multiplied by a small matrix, which is many times faster on a CPU than average pooling. In all
    other cases, average pooling is used, because its result for an image is the same, to the last
    bit, at every place in the batch.
    """
    across = across or size
    if size == across == 1:
        return planes
    height, width = planes.shape[2:]
    if height % size or width % across or not planes.requires_grad:
        return F.avg_pool2d(planes, (size, across), ceil_mode=True)
    cells = torch.eye(width // across, dtype=planes.dtype, device=planes.device) / (size * across)
    with torch.autocast(planes.device.type, enabled=False):  # keeps the precision of the planes
        rows = planes.reshape(-1, size * width) @ cells.repeat_interleave(across, 0).repeat(size, 1)
    return rows.view(*planes.shape[:2], height // size, width // across)


def to_root_norm(rows: Tensor, faint: float) -> Tensor:
    """Scale each row r to √d · r / (‖r‖ + faint), (B, d).

    The new norm is about √d, unless ‖r‖ is small.
    """
    return rows * (
        math.sqrt(rows.shape[1]) / (torch.linalg.vector_norm(rows, dim=1, keepdim=True) + faint)
    )


def unit(rows: Tensor) -> Tensor:
    """Centre each row and scale it to norm 1; a constant row becomes zero."""
    rows = rows - rows.mean(dim=1, keepdim=True)
    return rows / (torch.linalg.vector_norm(rows, dim=1, keepdim=True) + 1e-3)


def morlet(orientations: int) -> Tensor:
    """Return zero-mean Morlet wavelets, (2·orientations, 1, 7, 7): real, then imaginary parts."""
    sigma = 0.8
    slant = 0.5
    frequency = 0.75 * math.pi
    axis = torch.arange(7, dtype=torch.float32) - 3
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    angle = torch.arange(orientations, dtype=torch.float32)[:, None, None] * (
        math.pi / orientations
    )
    along = x * angle.cos() + y * angle.sin()
    across = y * angle.cos() - x * angle.sin()
    envelope = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
    envelope = envelope / envelope.sum((1, 2), keepdim=True)
    real = envelope * torch.cos(frequency * along)
    real = real - envelope * real.sum((1, 2), keepdim=True)
    imaginary = envelope * torch.sin(frequency * along)
    return torch.cat([real, imaginary])[:, None]
