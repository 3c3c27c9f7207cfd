"""Noisy moments of what a public network sees: the means of its features and of their squares, by class (DP-MEPF).

Two parts in one vector: the features of an image, brought to the norm √(1 − s), and their squares, to √s. So one
Gaussian of Δ = 1 releases both; it is what two of their own Δ cost whose noise is as the shares say. The query is that
of `embedding`, of other features.
Source: Harder et al. 2023.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from sfumato.data.images import Shape
from sfumato.errors import DataError, explained
from sfumato.features.fourier import FourierFeatures
from sfumato.features.projection import CELLS, ClassifierFeatures
from sfumato.features.public_network import PublicNetwork, arguments_of, build_network
from sfumato.settings.queries import FeatureMap, Moments
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_json
from sfumato.storage.weights import load_network, load_tensors, save_network, save_tensors

MOMENTS, ABOUT = "moments.safetensors", "features.json"


def moment_features(settings: Moments, shape: Shape, network: PublicNetwork) -> FourierFeatures:
    """What `fit_generator` matches: (B, C, H, W) -> (B, K) rows of norm 1, K = twice the network's features."""
    parts = [FeatureMap(map="network", kernel="linear", weight=1 - settings.squares)]
    if settings.squares > 0:
        parts.append(FeatureMap(map="network", kernel="squared", weight=settings.squares))
    seen = ClassifierFeatures(network, settings.feature == CELLS).eval()
    return FourierFeatures(shape, parts, 2, seed=0, maps={"network": lambda _: seen})


def save_moments(moments: Tensor, settings: Moments, network: PublicNetwork, directory: Path) -> None:
    """Write the release and the network that it is made of."""
    save_tensors({"moments": moments.contiguous()}, directory / MOMENTS)
    save_network(network, arguments_of(network), directory)
    write_json(directory / ABOUT, settings.model_dump(mode="json", exclude={"noise"}))


def load_moments(directory: Path, shape: Shape) -> tuple[Tensor, FourierFeatures]:
    """The release, (K, classes), and the features that it is made of. Raises DataError where files do not fit."""
    network = load_network(directory, build_network, "moments").eval()
    with explained(DataError, lambda error: f"{directory} holds no moments ({error!r}): run `stage moments` again"):
        features = moment_features(Moments(**read_json(directory / ABOUT)), shape, network)
        return load_tensors(directory / MOMENTS)["moments"], features
