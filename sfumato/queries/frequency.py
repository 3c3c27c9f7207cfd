"""Noisy joint embedding of images and labels by random Fourier features (FETA-Pro Algorithm 1, DP-MERF)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfumato import processes
from sfumato.compute import sent
from sfumato.config import FeatureMap
from sfumato.documents import read_json
from sfumato.errors import DataError, explained
from sfumato.features.alone import place_matters, rows_alone
from sfumato.features.fourier import FourierFeatures
from sfumato.privacy.rows import Rows, membership
from sfumato.weights import load_tensors, save_tensors

if TYPE_CHECKING:
    from sfumato.privacy.charge import Charge


def embedding_rows(
    features: FourierFeatures, images: Tensor, labels: Tensor, classes: int, one_by_one: bool = True
) -> Rows:
    """φ(x) ⊗ onehot(y): (B, C, H, W) float32 in [0, 1], (B,) int64 -> (B, K) ⊗ (B, classes). Source: FETA-Pro Eq. 5.

    φ has norm 1 up to the rounding of float32. A row depends on its image alone, to the last bit; one_by_one: False
    only where `place_matters` found that an image's place in a batch does not matter. Rows are made where the features
    are.
    """
    images, labels = (sent(part, features.amplitude.device) for part in (images, labels))
    return Rows(rows_alone(features, images, one_by_one), membership(labels, classes))


@torch.no_grad()
def query_frequency(charge: Charge, features: FourierFeatures, classes: int, public_size: float) -> Tensor:
    """The one release: the joint embedding over all sensitive images, noised by the charge, over a public size.

    The rows and their sum in float64 are made where `features` are. public_size: N̄, never a realised count. Returns
    (K, classes) float32, the target of `fit_generator`, on the CPU.
    """
    channels, height, width = features.shape
    matters = place_matters(features, (channels, height, width), features.amplitude.device)
    matters = not processes.fewest(not matters)  # an image's row must not depend on the process that it falls to
    released = charge.sum(
        lambda images, labels: embedding_rows(features, images, labels, classes, matters), 1.0, size=512
    )
    return (released / public_size).float()


def save_embedding(embedding: Tensor, features: FourierFeatures, directory: Path) -> None:
    """Write the release and what rebuilds its features."""
    save_tensors({"embedding": embedding.contiguous()}, directory / "embedding.safetensors")
    content = {
        "shape": features.shape,
        "size": 2 * features.frequencies or 2,
        "seed": features.seed,
        "features": [feature.model_dump(mode="json") for feature in features.features],
    }
    (directory / "features.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_embedding(directory: Path) -> tuple[Tensor, FourierFeatures]:
    """The release, (K, classes), and the features that it is made of."""
    with explained(DataError, lambda error: f"{directory} holds no embedding ({error!r}): run `stage frequency` again"):
        about = read_json(directory / "features.json")
        maps = [FeatureMap(**feature) for feature in about["features"]]
        features = FourierFeatures(tuple(about["shape"]), maps, about["size"], about["seed"])
        return load_tensors(directory / "embedding.safetensors")["embedding"], features
