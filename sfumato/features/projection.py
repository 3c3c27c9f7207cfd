"""A public map of an image, brought to few dimensions and unit norm by what public or released images look like."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.data.images import Shape, as_floats
from sfumato.errors import DataError
from sfumato.features import FEATURES
from sfumato.features.own_network import OWN, OwnFeatures
from sfumato.features.public_network import PublicNetwork, arguments_of, build_network
from sfumato.runtime.compute import device_of, fast_bfloat16
from sfumato.settings.queries import OwnNetwork

# the maps of a trained network: the input of its head, and its last feature map; all others are in FEATURES
CLASSIFIER, CELLS = "classifier", "cells"
FLOOR = 1e-3  # of the mean variance: added to each, so that flat directions are not blown up
LARGEST_SIDE = 2048  # pixels of an image, or channels
BATCH = 250  # public or released images at a time


class ClassifierFeatures(nn.Module):
    """The input of a public classifier's head, or its last feature map: (B, C, H, W) -> (B, d)."""

    def __init__(self, network: PublicNetwork, feature_map: bool = False) -> None:
        super().__init__()
        self.network, self.feature_map = network, feature_map

    def forward(self, images: Tensor) -> Tensor:
        kind = images.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=fast_bfloat16(kind)):
            found = self.network.feature_map(images) if self.feature_map else self.network.features(images)
            return found.flatten(1).float()


class ProjectedFeatures(nn.Module):
    """ψ: (B, C, H, W) images in [0, 1] -> (B, d) rows of norm 1, differentiable; d = dimension, or what the map has.

    feature: an entry of FEATURES, or CLASSIFIER, CELLS or OWN with `network`, the arguments that rebuild the network.
    flip: an image and its mirror image have the same row.
    The map's output is centred, projected on its principal directions, each scaled by a power of its variance, and
    brought to norm 1. `fit` finds them. Rows of one image do not depend on the others'.
    """

    mean: Tensor
    directions: Tensor

    def __init__(
        self, feature: str, shape: Shape, dimension: int, network: Mapping[str, Any] | None = None, flip: bool = False
    ) -> None:
        super().__init__()
        if max(shape) > LARGEST_SIDE:
            raise DataError(f"images of shape {tuple(shape)}: features are of {LARGEST_SIDE} pixels a side at most")
        self.feature, self.shape, self.network, self.flip = feature, tuple(shape), network, flip
        if feature == OWN and network is not None:
            self.map: nn.Module = OwnFeatures(OwnNetwork.model_validate(network))
        elif network is not None:
            self.map = ClassifierFeatures(build_network(**network), feature == CELLS).eval()
        else:
            self.map = FEATURES[feature]((*shape,))  # type: ignore[arg-type]
        with torch.no_grad():
            width = self.map(torch.zeros(1, *shape)).shape[1]
        self.dimension = min(dimension, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("directions", torch.zeros(width, self.dimension))

    @classmethod
    def through(
        cls, network: PublicNetwork | None, feature: str, shape: Shape, dimension: int, flip: bool = False
    ) -> ProjectedFeatures:
        """The same map, which looks at images through the trained `network`, if there is one, on its device."""
        if network is None:
            return cls(feature, shape, dimension, flip=flip)
        features = cls(feature, shape, dimension, arguments_of(network), flip)
        features.map = ClassifierFeatures(network, feature == CELLS).eval()
        return features.to(device_of(network))

    def mapped(self, images: Tensor) -> Tensor:
        """The map's output, or the mean of it and of that of the mirror images."""
        return (self.map(images) + self.map(images.flip(3))) / 2 if self.flip else self.map(images)  # type: ignore[no-any-return]

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.normalize((self.mapped(images) - self.mean) @ self.directions, dim=1)

    @torch.no_grad()
    def fit(self, images: Tensor, power: float, seed: int) -> None:
        """Find centre and directions from public or released images, (n, C, H, W) uint8, or float32 in [0, 1].

        power: p; a direction of variance λ is scaled by λ^(−p/2), so that 0 keeps the variances and 1 makes them equal.
        """
        device = self.mean.device
        rows = torch.cat([self.mapped(as_floats(part.to(device))) for part in images.split(BATCH)]).cpu()
        mean = rows.mean(0)
        spread = rows.std(0) if self.network is not None else torch.ones_like(mean)
        rows = (rows - mean) / spread.clamp(min=1e-6)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            _, singular, vectors = torch.svd_lowrank(rows, q=min(self.dimension + 16, *rows.shape), niter=4)
        variances = singular.square()[: self.dimension] / len(rows)
        floor = FLOOR * rows.square().sum() / rows.numel()
        self.mean.copy_(mean)
        found = vectors[:, : self.dimension] * (variances + floor) ** (-power / 2) / spread.clamp(min=1e-6)[:, None]
        self.directions.zero_()[:, : found.shape[1]] = found

    def config(self) -> dict:
        """The arguments that rebuild this map."""
        network = dict(self.network) if self.network else None
        found = {"feature": self.feature, "shape": [*self.shape], "dimension": self.dimension, "network": network}
        return found | ({"flip": True} if self.flip else {})


class ScaleToSqrtD(nn.Module):
    """Rows of norm 1 scaled to norm √d, in whose units length-scales are given: (B, C, H, W) -> (B, d)."""

    def __init__(self, features: ProjectedFeatures) -> None:
        super().__init__()
        self.features = features

    def forward(self, images: Tensor) -> Tensor:
        return self.features(images) * math.sqrt(self.features.dimension)  # type: ignore[no-any-return]
