"""A public feature map whose output is projected to few dimensions and scaled to norm 1.

The projection is fitted to public or released images.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.data.images import Shape, as_floats
from sfumato.errors import DataError
from sfumato.features import CELLS, CLASSIFIER, FEATURES, OWN
from sfumato.features.own_network import OwnFeatures
from sfumato.features.public_network import PublicNetwork, arguments_of, build_network
from sfumato.runtime.compute import device_of, fast_bfloat16
from sfumato.settings.queries import OwnNetwork, TeacherMap

# Type of the argument `network`; the docstring of `map_of` describes the values
Network = PublicNetwork | OwnNetwork | dict[str, Any] | None
FEATURE_BATCH = 250  # Number of public or released images per batch


class ClassifierFeatures(nn.Module):
    """Features of a public classifier, or its last feature map: (B, C, H, W) -> (B, d)."""

    def __init__(self, network: PublicNetwork, feature_map: bool = False) -> None:
        super().__init__()
        self.network = network
        self.features = network.feature_map if feature_map else network.features

    def forward(self, images: Tensor) -> Tensor:
        kind = images.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=fast_bfloat16(kind)):
            return self.features(images).flatten(1).float()


def map_of(feature: str, shape: Shape, network: Network) -> nn.Module:
    """Build a map by name: one of FEATURES, or CLASSIFIER, CELLS or OWN.

    network: for CLASSIFIER and CELLS, a network or the arguments that rebuild it; for OWN, the
    settings of the network.
    """
    if feature == OWN:
        return OwnFeatures(OwnNetwork.model_validate(network))
    if feature not in (CLASSIFIER, CELLS):
        return FEATURES[feature](shape)
    if isinstance(network, dict):
        network = build_network(**network)
    if not isinstance(network, PublicNetwork):  # `network` may come from a damaged file
        raise TypeError(f"the map {feature} requires a network, not {type(network).__name__}")
    return ClassifierFeatures(network, feature == CELLS).eval()


class SideBySide(nn.Module):
    """The outputs of several maps side by side: (B, C, H, W) -> (B, Σ d), rows of norm at most 1.

    The output of each map is centred and scaled to norm √w, where w is the map's share of the sum
    of all weights.

    parts: maps and their weights;
    network: network of the maps CLASSIFIER and CELLS, unless a part has a network of its own.
    """

    def __init__(self, parts: Sequence[TeacherMap], shape: Shape, network: Network) -> None:
        super().__init__()
        self.maps = nn.ModuleList(
            [map_of(part.map, shape, part.network or network) for part in parts]
        )
        self.norms = [
            math.sqrt(part.weight / sum(other.weight for other in parts)) for part in parts
        ]
        self.to(device_of(self))
        with torch.no_grad():
            blank = self.blocks(torch.zeros(1, *shape, device=device_of(self)))
        self.centre = nn.Buffer(torch.zeros_like(torch.cat(blank, dim=1)[0]))

    def blocks(self, images: Tensor) -> list[Tensor]:
        return [part(images) for part in self.maps]

    def forward(self, images: Tensor) -> Tensor:
        blocks = self.blocks(images)
        centres = self.centre.split([block.shape[1] for block in blocks])
        triples = zip(self.norms, blocks, centres, strict=True)
        return torch.cat(
            [
                norm * nn.functional.normalize(block - centre, dim=1)
                for norm, block, centre in triples
            ],
            dim=1,
        )


class ProjectedFeatures(nn.Module):
    """ψ: (B, C, H, W) images in [0, 1] -> (B, d) rows of norm 1, differentiable.

    feature: name of one map, see `map_of`, or several maps, see `SideBySide`;
    network: network of these maps, as in `map_of` and `SideBySide`;
    dimension: maximum d. If the map has fewer outputs, d is their number;
    flip: whether to give an image and its mirror image the same row.

    The map's output is centred and projected on its principal directions, which `fit` finds. Each
    coordinate is scaled by a power of its variance, and then the row is scaled to norm 1. An
    image's row does not depend on other images.
    """

    def __init__(
        self,
        feature: str | Sequence[TeacherMap | Mapping[str, object]],
        shape: Shape,
        dimension: int,
        network: Network = None,
        flip: bool = False,
    ) -> None:
        super().__init__()
        if max(shape) > 2048:
            raise DataError(
                f"images of shape {tuple(shape)} are too large: features support at most 2048 "
                "pixels per side"
            )
        self.feature = feature
        self.shape: Shape = (*shape,)
        self.flip = flip
        self.arguments = arguments_of(network) if isinstance(network, PublicNetwork) else network
        if isinstance(feature, str):
            self.map = map_of(feature, self.shape, network)
        else:
            parts = [TeacherMap.model_validate(part) for part in feature]
            self.feature = [part.model_dump(mode="json") for part in parts]
            self.map = SideBySide(parts, self.shape, network)
        with torch.no_grad():
            width = self.map(torch.zeros(1, *shape, device=device_of(self.map))).shape[1]
        self.dimension = min(dimension, width)
        self.mean = nn.Buffer(torch.zeros(width))
        self.directions = nn.Buffer(torch.zeros(width, self.dimension))
        self.to(device_of(self.map))

    def mapped(self, images: Tensor) -> Tensor:
        """Return the map's output or, with `flip`, its mean over an image and its mirror image."""
        rows = self.map(images)
        if self.flip:
            rows = (rows + self.map(images.flip(3))) / 2
        return rows  # type: ignore[no-any-return]

    def projected(self, rows: Tensor) -> Tensor:
        """Compute ψ from the output of `mapped`."""
        return nn.functional.normalize((rows - self.mean) @ self.directions, dim=1)

    def forward(self, images: Tensor) -> Tensor:
        return self.projected(self.mapped(images))

    @torch.no_grad()
    def fit(self, images: Tensor, power: float, seed: int) -> Tensor:
        """Find the mean and the principal directions of the map's output on public or released
        images.

        images: (n, C, H, W) uint8, or float32 in [0, 1];
        power: p. A coordinate with variance λ is scaled by λ^(−p/2), so that p = 0 keeps the
        variances and p = 1 makes them equal;
        seed: seed of the randomised decomposition that finds the directions.

        Returns ψ of the images, (n, d). Raises DataError if the features of all images are equal,
        or if some are not finite.
        """
        device = self.mean.device
        if isinstance(self.map, SideBySide):
            blocks = self.map.blocks(as_floats(images[:FEATURE_BATCH].to(device)))
            self.map.centre.copy_(torch.cat(blocks, dim=1).mean(0))
        outputs = torch.cat(
            [self.mapped(as_floats(part.to(device))) for part in images.split(FEATURE_BATCH)]
        )
        mean = outputs.mean(0)
        spread = torch.ones_like(mean)
        if isinstance(self.map, (ClassifierFeatures, OwnFeatures)):
            spread = outputs.std(0).clamp(min=1e-6)
        rows = (outputs - mean) / spread
        # A floor on each variance prevents directions without variance from being amplified.
        floor = 1e-3 * rows.square().sum() / rows.numel()
        if not 0 < floor < math.inf:
            raise DataError(
                f"the feature map cannot be fitted to {len(images)} images, because their features "
                "are equal or not finite: use more images, or another feature map"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            _, singular, vectors = torch.svd_lowrank(
                rows, q=min(self.dimension + 16, *rows.shape), niter=4
            )
        variances = singular.square()[: self.dimension] / len(rows)
        self.mean.copy_(mean)
        scaled = (
            vectors[:, : self.dimension] * (variances + floor) ** (-power / 2) / spread[:, None]
        )
        self.directions.zero_()[:, : scaled.shape[1]] = scaled
        return torch.cat([self.projected(part) for part in outputs.split(FEATURE_BATCH)])

    def config(self) -> dict:
        """Return the arguments that rebuild this map."""
        arguments = {"feature": self.feature, "shape": [*self.shape], "dimension": self.dimension}
        arguments["network"] = self.arguments
        if self.flip:
            arguments["flip"] = True
        return arguments


class ScaleToSqrtD(nn.Module):
    """Projected features, scaled to norm √d: (B, C, H, W) -> (B, d).

    Fourier features need this norm, because their length-scales are in units of √d.
    """

    def __init__(self, features: ProjectedFeatures) -> None:
        super().__init__()
        self.features = features

    def forward(self, images: Tensor) -> Tensor:
        return self.features(images) * math.sqrt(self.features.dimension)
