"""Noisy joint embedding of images and labels by random Fourier features (FETA-Pro Algorithm 1, DP-MERF).

Each image is taken through public maps (its pixels, its wavelet-scattering coefficients), each map through random Fourier features at
several length-scales, and the whole vector has norm 1. The frequencies come from a public seed, so that they are rebuilt and never stored;
the same features, which are differentiable, later fit the auxiliary generator (`sfumato.warmup.generator`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.config import FeatureMap
from sfumato.queries.central import Shape, clip_rows

if TYPE_CHECKING:
    from sfumato.privacy.charge import Charge


class Pixels(nn.Module):
    """The image itself, flattened: (B, C, H, W) -> (B, d)."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)


class Scattering(nn.Module):
    """Wavelet-scattering coefficients with fixed Morlet filters, each image's vector scaled to norm √d.

    (B, C, H, W) -> (B, d). At each of `scales` octaves, |image * ψ_θ| for `orientations` angles, averaged over cells of 2^scales pixels,
    beside the average image: the zeroth and first order. Source: Bruna and Mallat 2013, in the cascade form.
    """

    filters: Tensor
    blur: Tensor

    def __init__(self, shape: Shape, scales: int | None = None, orientations: int = 8) -> None:
        super().__init__()
        self.scales = scales if scales is not None else (2 if min(shape[1:]) >= 16 else 1)
        self.register_buffer("filters", morlet(orientations), persistent=False)  # (2·orientations, 1, 7, 7)
        axis = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
        self.register_buffer("blur", torch.outer(axis, axis)[None, None], persistent=False)

    def halve(self, planes: Tensor) -> Tensor:
        return F.conv2d(planes, self.blur.to(planes), stride=2, padding=2)

    def moduli(self, planes: Tensor) -> Tensor:
        """|plane * ψ_θ| for each of N planes: (N, 1, H, W) -> (N, orientations, H, W)."""
        real, imaginary = F.conv2d(planes, self.filters.to(planes), padding=3).chunk(2, dim=1)
        return (
            real.square() + imaginary.square() + 1e-6
        ).sqrt() - 1e-3  # smooth at zero, where a gradient would be undefined

    def cells(self, planes: Tensor, octave: int) -> Tensor:
        return F.avg_pool2d(planes, 2 ** (self.scales - octave), ceil_mode=True)

    def forward(self, images: Tensor) -> Tensor:
        count = len(images)
        plane = images.flatten(0, 1)[:, None]  # (B·C, 1, H, W)
        rows = [F.avg_pool2d(plane, 2**self.scales, ceil_mode=True).reshape(count, -1)]
        for octave in range(self.scales):
            rows.append(self.cells(self.moduli(plane), octave).reshape(count, -1))
            plane = self.halve(plane)
        row = torch.cat(rows, dim=1)
        return row * (math.sqrt(row.shape[1]) / (torch.linalg.vector_norm(row, dim=1, keepdim=True) + 1e-3))


def morlet(
    orientations: int, size: int = 7, sigma: float = 0.8, slant: float = 0.5, frequency: float = 0.75 * math.pi
) -> Tensor:
    """Morlet wavelets of zero mean: (2·orientations, 1, size, size), the real parts first, then the imaginary ones."""
    axis = torch.arange(size, dtype=torch.float32) - size // 2
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    angle = torch.arange(orientations, dtype=torch.float32)[:, None, None] * (math.pi / orientations)
    along, across = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
    envelope = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
    envelope = envelope / envelope.sum((1, 2), keepdim=True)
    real, imaginary = envelope * torch.cos(frequency * along), envelope * torch.sin(frequency * along)
    real = real - envelope * real.sum((1, 2), keepdim=True)
    return torch.cat([real, imaginary])[:, None]


MAPS: dict[str, Callable[[Shape], nn.Module]] = {"pixels": lambda shape: Pixels(), "scattering": Scattering}


class FourierFeatures(nn.Module):
    """φ: (B, C, H, W) images in [0, 1] -> (B, K) rows of norm 1, differentiable.

    shape: (C, H, W); features: the public maps; size: K, even; seed: public. The K/2 frequencies are dealt equally to every (map,
    length-scale); a map's share of the squared norm is its weight, split evenly over its length-scales. ω ~ N(0, I/ℓ²) with ℓ in units
    of √d, d the dimension of the map's output. Nothing here is stored: the same arguments rebuild the same φ.
    """

    amplitude: Tensor

    def __init__(self, shape: Shape, features: Sequence[FeatureMap], size: int, seed: int) -> None:
        super().__init__()
        banks = sum(len(feature.length_scales) for feature in features)
        if size % 2 or size < 2 * banks:
            raise ValueError(
                f"frequency.size={size}: expected an even number, at least two for each of the {banks} length-scales"
            )
        self.shape, self.size = tuple(shape), size
        public = torch.Generator().manual_seed(seed)
        weights = sum(feature.weight for feature in features)
        shares = [size // 2 // banks + (bank < size // 2 % banks) for bank in range(banks)]
        self.maps = nn.ModuleList()
        amplitudes, bank = [], 0
        for index, feature in enumerate(features):
            image_map = MAPS[feature.map](shape)
            width = image_map(torch.zeros(1, *shape)).shape[1]
            columns = []
            for length_scale in feature.length_scales:
                number = shares[bank]
                columns.append(torch.randn(width, number, generator=public) / (length_scale * math.sqrt(width)))
                amplitudes.append(
                    torch.full((number,), math.sqrt(feature.weight / weights / len(feature.length_scales) / number))
                )
                bank += 1
            self.maps.append(image_map)
            self.register_buffer(f"omega_{index}", torch.cat(columns, dim=1), persistent=False)
        self.register_buffer("amplitude", torch.cat(amplitudes), persistent=False)  # (K/2,), squares summing to 1

    def phases(self, images: Tensor) -> Tensor:
        """ωᵀ map(x) for every frequency of every map: (B, K/2)."""
        return torch.cat(
            [image_map(images) @ getattr(self, f"omega_{i}") for i, image_map in enumerate(self.maps)], dim=1
        )

    def forward(self, images: Tensor) -> Tensor:
        phase = self.phases(images)
        return torch.cat([phase.cos() * self.amplitude, phase.sin() * self.amplitude], dim=1)

    def embed(self, images: Tensor, weights: Tensor) -> Tensor:
        """Σ_i φ(x_i) ⊗ weights_i, (B, M) weights -> (K, M): the joint embedding without the (B, K) matrix of scaled rows."""
        phase = self.phases(images)
        amplitude = self.amplitude[:, None]
        weights = weights.to(phase)
        return torch.cat([(phase.cos().T @ weights).float() * amplitude, (phase.sin().T @ weights).float() * amplitude])


def embedding_sum(features: FourierFeatures, images: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Sum of φ(x) ⊗ onehot(y) over a batch.

    images: (B, C, H, W) float32 in [0, 1]; labels: (B,) int64. Returns (K, classes) float64.
    Guarantee: one image more or less changes the sum by at most 1 in L2: φ has norm 1 and touches one column. A row with any non-finite
    entry is zeroed. The clip only trims what float32 rounding adds to the norm.
    Source: FETA-Pro Eq. 5.
    """
    rows = clip_rows(features(images), 1.0)  # (B, K)
    total = torch.zeros(features.size, classes, dtype=torch.float64, device=rows.device)
    for m in labels.unique().tolist():
        if 0 <= m < classes:  # a label out of range counts nowhere, and stops no query
            total[:, m] = rows[labels == m].sum(0, dtype=torch.float64)
    return total


@torch.no_grad()
def query_frequency(charge: Charge, features: FourierFeatures, classes: int, public_size: float) -> Tensor:
    """The one release: the joint embedding over all sensitive images, noised by the charge, over a public size.

    public_size: N̄, never a realised count. Returns (K, classes) float32, the target of `fit_generator`.
    """
    total = torch.zeros(features.size, classes, dtype=torch.float64)
    for images, labels in charge.batches(size=512):
        total += embedding_sum(features, images, labels, classes).cpu()
    return (charge.release(total, max_norm=1.0).double() / public_size).float()
