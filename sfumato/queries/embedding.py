"""Noisy joint embedding under features that were learned on what was released before (METHODS §9c).

The maps are the teacher's, and those of a network that studied the generator's images under the teacher's labels. What
they know was paid for by the releases that they come from, whose records this one carries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sfumato.data.images import ImageSet
from sfumato.errors import DataError, explained
from sfumato.features.fourier import FourierFeatures
from sfumato.features.projection import CELLS, ProjectedFeatures
from sfumato.privacy.rows import Rows, one_hot
from sfumato.queries.teacher import TeacherNetwork, relabelled, spanning
from sfumato.runtime.compute import to_device
from sfumato.settings.queries import Embedding, FeatureMap, Learned
from sfumato.settings.training import Classifier
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_json
from sfumato.storage.weights import load_network, load_tensors, save_network, save_tensors
from sfumato.training.public_classifier import train_public_classifier

if TYPE_CHECKING:
    from sfumato.privacy.charge import Charge

EMBEDDING, ABOUT = "embedding.safetensors", "features.json"


class Stretched(nn.Module):
    """Rows of norm 1, brought to norm √d, in whose units length-scales are given: (B, C, H, W) -> (B, d)."""

    def __init__(self, features: ProjectedFeatures) -> None:
        super().__init__()
        self.features = features

    def forward(self, images: Tensor) -> Tensor:
        return self.features(images) * math.sqrt(self.features.dimension)  # type: ignore[no-any-return]


def study(
    settings: Learned,
    images: ImageSet,
    teacher: TeacherNetwork,
    seed: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> ProjectedFeatures:
    """The last cells of a network trained on the generator's `images`, which the teacher labels. Free."""
    how = Classifier(network="whitened", **settings.model_dump(include={"width", "steps", "batch", "learning_rate"}))
    network, _ = train_public_classifier(relabelled(teacher, images), how, seed, report)
    found = ProjectedFeatures.through(network, CELLS, images.shape, settings.dimension)
    found.fit(spanning(images, seed), settings.power, seed)
    return found


def learned_features(
    settings: Embedding, teacher: ProjectedFeatures, network: ProjectedFeatures, seed: int
) -> FourierFeatures:
    """The Fourier features of both maps. Of the squared norm, the teacher's have the share `settings.teacher`."""
    maps = {"teacher": (teacher, settings.teacher), "network": (network, 1 - settings.teacher)}
    features = [
        FeatureMap(map=name, length_scales=settings.length_scales, weight=weight) for name, (_, weight) in maps.items()
    ]
    makers = {name: lambda shape, known=known: Stretched(known) for name, (known, _) in maps.items()}
    channels, height, width = teacher.shape
    return FourierFeatures((channels, height, width), features, settings.size, seed, makers)


def embedding_rows(features: FourierFeatures, classes: int, vectors: Tensor, labels: Tensor) -> Rows:
    """φ ⊗ onehot(y) of images whose maps are known: (B, Σ d), (B,) int64 -> (B, K) ⊗ (B, classes). φ has norm 1.

    float64, made where the features are.
    """
    vectors, labels = (to_device(part, features.amplitude.device) for part in (vectors, labels))
    return Rows(features.of_vectors(vectors.double()), one_hot(labels, classes))


@torch.no_grad()
def query_embedding(charge: Charge, features: FourierFeatures, classes: int, public_size: float) -> Tensor:
    """The one release: the joint embedding over all sensitive images, noised by the charge, over a public size.

    The charge draws `features.vectors` of the images. public_size: N̄, never a realised count. Returns (K, classes)
    float32, a target of `fit_generator`.
    """
    released = charge.sum(partial(embedding_rows, features, classes), 1.0, size=512)
    return (released / public_size).float()


def save_learned(embedding: Tensor, settings: Embedding, network: ProjectedFeatures, seed: int, folder: Path) -> None:
    """Write the release and what rebuilds its features beside the teacher."""
    save_tensors({"embedding": embedding.contiguous()}, folder / EMBEDDING)
    save_network(network, network.config(), folder)
    write_json(folder / ABOUT, {"seed": seed, **settings.model_dump(mode="json", exclude={"noise", "learned"})})


def load_learned(folder: Path, teacher: ProjectedFeatures) -> tuple[Tensor, FourierFeatures]:
    """The release, (K, classes), and the features that it is made of. Raises DataError where files do not fit."""
    network = load_network(folder, ProjectedFeatures, "embedding").eval()
    with explained(DataError, lambda error: f"{folder} holds no embedding ({error!r}): run `stage embedding` again"):
        about = read_json(folder / ABOUT)
        settings = Embedding(**{key: value for key, value in about.items() if key != "seed"})
        features = learned_features(settings, teacher, network, about["seed"])
        return load_tensors(folder / EMBEDDING)["embedding"], features
