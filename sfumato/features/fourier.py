"""Feature map of the query `frequency`: random Fourier features of the outputs of public maps.

Source: FETA-Pro Algorithm 1; DP-MERF.

Public maps, such as the pixels or the wavelet-scattering coefficients, are applied to each image.
Random Fourier features at several length-scales are applied to the output of each map. The output
of a map can also be used as it is. The full vector has norm 1. The frequencies come from a public
seed: they are rebuilt, never stored. The release consists of noisy sums of these features over
images. Because the features are differentiable, a generator can later be fitted to the release, so
that the features of the generator's images have the same sums.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.data.images import Shape
from sfumato.features import FEATURES
from sfumato.features.scattering import block_average
from sfumato.runtime.compute import device_of
from sfumato.settings.queries import FeatureMap

EXPLICIT_KERNELS = ("linear", "squared")  # Kernels that need no random frequencies


class OfBlocks(nn.Module):
    """A public map, applied to the block means of images.

    The input is images, (B, C, H, W), at full size or already averaged over blocks. The side of
    these blocks is at most `block`.

    block: side of the blocks that the map uses, in pixels of the full image.
    """

    def __init__(self, build: Callable[[Shape], nn.Module], shape: Shape, block: int) -> None:
        super().__init__()
        self.sides = -(-shape[1] // block), -(-shape[2] // block)
        self.map = build((shape[0], *self.sides))

    def forward(self, images: Tensor) -> Tensor:
        rows, columns = (
            -(-length // side) for length, side in zip(images.shape[2:], self.sides, strict=True)
        )
        return self.map(block_average(images, rows, columns))  # type: ignore[no-any-return]


class FourierFeatures(nn.Module):
    """φ: (B, C, H, W) images in [0, 1] -> (B, K) rows of norm 1, differentiable.

    shape: (C, H, W);
    features: public maps;
    size: number of Fourier features, which is even: a cosine and a sine per frequency;
    seed: public seed of the frequencies;
    maps: constructor of each map, by its name.

    The frequencies are split equally between all pairs of a map and one of its length-scales. A
    map's share of the squared norm is proportional to its weight, and is split evenly over its
    length-scales. A frequency is ω ~ N(0, I/ℓ²), where ℓ is √d times the length-scale, and d is the
    dimension of the map's output. For the kernel "rational-quadratic", 1/(1 + r²/(2ℓ²)), each ω is
    multiplied by the square root of an exponentially distributed number.

    A map with the kernel "linear" or "squared" has no frequencies. Its output, or its squared
    output, is scaled to norm 1 and appended to the Fourier features. So K is `size` plus the
    dimensions of these maps. If all maps have such kernels, there are no Fourier features.
    """

    def __init__(
        self,
        shape: Shape,
        features: Sequence[FeatureMap],
        size: int,
        seed: int,
        maps: Mapping[str, Callable[[Shape], nn.Module]] = FEATURES,
    ) -> None:
        super().__init__()
        banks = sum(
            len(feature.length_scales)
            for feature in features
            if feature.kernel not in EXPLICIT_KERNELS
        )
        if size % 2 or size < 2 * banks:
            raise ValueError(
                f"frequency.size={size}: expected an even number of at least {2 * banks}, because "
                "each entry of length_scales needs two or more features"
            )
        self.shape = shape
        self.seed = seed
        self.features = tuple(features)
        self.frequencies = size // 2 if banks else 0
        public = torch.Generator().manual_seed(seed)
        self.weights = sum(feature.weight for feature in features)
        shares = (size // 2 // banks + (bank < size // 2 % banks) for bank in range(banks))
        self.maps = nn.ModuleList()
        self.widths = []
        amplitudes = [torch.empty(0)]
        for index, feature in enumerate(features):
            image_map = OfBlocks(maps[feature.map], shape, feature.block)
            with torch.no_grad():
                width = image_map(torch.zeros(1, *shape, device=device_of(image_map))).shape[1]
            self.maps.append(image_map)
            self.widths.append(width)
            if feature.kernel in EXPLICIT_KERNELS:
                continue
            columns = []
            for length_scale in feature.length_scales:
                number = next(shares)
                omega = torch.randn(width, number, generator=public) / (
                    length_scale * math.sqrt(width)
                )
                if feature.kernel == "rational-quadratic":
                    omega = omega * torch.empty(number).exponential_(generator=public).sqrt()
                columns.append(omega)
                part = feature.weight / self.weights / len(feature.length_scales)
                amplitudes.append(torch.full((number,), math.sqrt(part / number)))
            self.register_buffer(f"omega_{index}", torch.cat(columns, dim=1), persistent=False)
        # Amplitude of each frequency. The squares of all amplitudes add up to at most 1.
        self.amplitude = nn.Buffer(torch.cat(amplitudes), persistent=False)
        self.plain = [
            index for index, feature in enumerate(features) if feature.kernel in EXPLICIT_KERNELS
        ]
        self.size = 2 * self.frequencies + sum(self.widths[index] for index in self.plain)

    @property
    def arguments(self) -> dict[str, object]:
        """JSON arguments that rebuild φ from public maps."""
        maps = [feature.model_dump(mode="json") for feature in self.features]
        return {
            "shape": self.shape,
            "size": 2 * self.frequencies or 2,
            "seed": self.seed,
            "features": maps,
        }

    def vectors(self, images: Tensor) -> Tensor:
        """Concatenate the outputs of all maps for the images: (B, Σ d).

        If the images are block means, the outputs of maps that need finer images are zeros.
        """
        block = self.block_of(images)
        vectors = []
        for image_map, feature, width in zip(self.maps, self.features, self.widths, strict=True):
            if feature.block >= block:
                vectors.append(image_map(images).to(images.dtype))
            else:
                vectors.append(images.new_zeros(len(images), width))
        return torch.cat(vectors, dim=1)

    def block_of(self, images: Tensor) -> int:
        """Return the side of the blocks, in pixels, if the images are block means; otherwise 1."""
        return max(
            -(-length // side)
            for length, side in zip(self.shape[1:], images.shape[2:], strict=True)
        )

    def active(self, block: int) -> Tensor:
        """Return which features can be computed from means of blocks with this side, (K,) bool."""
        is_active = [feature.block >= block for feature in self.features]
        waves = [torch.full((omega.shape[1],), is_active[i]) for i, omega in self.omegas.items()]
        plain = [torch.full((self.widths[i],), is_active[i]) for i in self.plain]
        return torch.cat([*waves, *waves, *plain])

    @property
    def omegas(self) -> dict[int, Tensor]:
        """The frequencies ω of each map that has frequencies, by the map's index in `features`."""
        return {
            i: getattr(self, f"omega_{i}") for i in range(len(self.maps)) if i not in self.plain
        }

    def phases(self, vectors: Tensor, block: int = 1) -> Tensor:
        """Compute ωᵀ map(x) for all frequencies of all maps: (B, Σ d) -> (B, frequencies).

        block: side of the blocks, in pixels, if the vectors were computed from block means. If a
        map needs smaller blocks, its phases are zero.
        """
        parts = vectors.split(self.widths, dim=1)
        phases = [vectors[:, :0]]
        for i, omega in self.omegas.items():
            if self.features[i].block >= block:
                phases.append(parts[i] @ omega.to(parts[i]))
            else:
                phases.append(vectors.new_zeros(len(vectors), omega.shape[1]))
        return torch.cat(phases, dim=1)

    def raw_maps(self, vectors: Tensor) -> Tensor:
        """Return the outputs of the maps without frequencies, scaled to their share of the norm.

        The outputs of a map with the kernel "squared" are squared.

        vectors: (B, Σ d over all maps). Returns (B, Σ d over maps without frequencies).
        """
        parts = vectors.split(self.widths, dim=1)
        rows = [vectors[:, :0]]
        for index in self.plain:
            feature = self.features[index]
            row = F.normalize(parts[index], dim=1)
            if feature.kernel == "squared":
                row = F.normalize(row.square(), dim=1)
            rows.append(math.sqrt(feature.weight / self.weights) * row)
        return torch.cat(rows, dim=1)

    def from_maps(self, vectors: Tensor) -> Tensor:
        """Compute φ from `vectors`: (B, Σ d) -> (B, K), in the precision of the vectors."""
        phase = self.phases(vectors)
        amplitude = self.amplitude.to(phase)
        return torch.cat(
            [phase.cos() * amplitude, phase.sin() * amplitude, self.raw_maps(vectors)], dim=1
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.from_maps(self.vectors(images))

    def embed(self, images: Tensor, weights: Tensor) -> Tensor:
        """Compute the joint embedding Σ_i φ(x_i) ⊗ weights_i, (K, M), without a (B, K) matrix.

        images: (B, C, H, W), full images or block means. With block means, only the `active` rows
        of the embedding are valid;
        weights: (B, M).
        """
        vectors = self.vectors(images)
        phase = self.phases(vectors, self.block_of(images))
        plain = self.raw_maps(vectors)
        amplitude = self.amplitude[:, None]
        weights = weights.to(phase)
        waves = [(wave.T @ weights).float() * amplitude for wave in (phase.cos(), phase.sin())]
        return torch.cat([*waves, (plain.T @ weights.to(plain)).float()])
