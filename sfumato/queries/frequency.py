"""Noisy joint embedding of images and labels by random Fourier features (FETA-Pro Algorithm 1, DP-MERF)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sfumato.config import FeatureMap
from sfumato.features.fourier import FourierFeatures
from sfumato.queries.central import clip_rows

if TYPE_CHECKING:
    from sfumato.privacy.charge import Charge


def embedding_sum(features: FourierFeatures, images: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Sum of φ(x) ⊗ onehot(y) over a batch.

    images: (B, C, H, W) float32 in [0, 1]; labels: (B,) int64. Returns (K, classes) float64.
    Guarantee: one image more or less changes the sum by at most 1 in L2: φ has norm 1 and touches one column. A row
    with any non-finite entry is zeroed. The clip only trims what float32 rounding adds to the norm.
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


def save_embedding(embedding: Tensor, features: FourierFeatures, directory: Path) -> None:
    """Write the release and what rebuilds its features."""
    save_file({"embedding": embedding.contiguous()}, directory / "embedding.safetensors")
    content = {
        "shape": features.shape,
        "size": features.size,
        "seed": features.seed,
        "features": [feature.model_dump(mode="json") for feature in features.features],
    }
    (directory / "features.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_embedding(directory: Path) -> tuple[Tensor, FourierFeatures]:
    """The release, (K, classes), and the features that it is made of."""
    about = json.loads((directory / "features.json").read_text(encoding="utf-8"))
    maps = [FeatureMap(**feature) for feature in about["features"]]
    features = FourierFeatures(tuple(about["shape"]), maps, about["size"], about["seed"])
    return load_file(directory / "embedding.safetensors")["embedding"], features
