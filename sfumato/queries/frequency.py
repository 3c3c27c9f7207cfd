"""Noisy joint embedding of images and labels by random Fourier features (FETA-Pro Algorithm 1, DP-MERF)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from sfumato.errors import DataError, explained
from sfumato.features.fourier import FourierFeatures
from sfumato.settings.queries import FeatureMap
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_json
from sfumato.storage.weights import load_tensors, save_tensors


def save_embedding(embedding: Tensor, features: FourierFeatures, directory: Path) -> None:
    """Write the release and what rebuilds its features."""
    save_tensors({"embedding": embedding.contiguous()}, directory / "embedding.safetensors")
    content = {
        "shape": features.shape,
        "size": 2 * features.frequencies or 2,
        "seed": features.seed,
        "features": [feature.model_dump(mode="json") for feature in features.features],
    }
    write_json(directory / "features.json", content)


def load_embedding(directory: Path) -> tuple[Tensor, FourierFeatures]:
    """The release, (K, classes), and the features that it is made of."""
    with explained(DataError, lambda error: f"{directory} holds no embedding ({error!r}): run `stage frequency` again"):
        about = read_json(directory / "features.json")
        maps = [FeatureMap(**feature) for feature in about["features"]]
        features = FourierFeatures(tuple(about["shape"]), maps, about["size"], about["seed"])
        return load_tensors(directory / "embedding.safetensors")["embedding"], features
