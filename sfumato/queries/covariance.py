"""Noisy means and covariances of the low frequencies of the images, by class: one Gaussian in the place of a class.

The query is that of `frequency`, of other features: an image adds a row of norm 1 at most to the column of its class.
"""

from __future__ import annotations

from pathlib import Path

from sfumato.data.images import Shape
from sfumato.errors import DataError, explained
from sfumato.features.cosine import ClassMoments, CosineMoments
from sfumato.settings.queries import Covariance
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_json
from sfumato.storage.weights import load_tensors, save_tensors

MOMENTS, ABOUT = "covariance.safetensors", "features.json"


def cosine_moments(settings: Covariance, shape: Shape) -> CosineMoments:
    """The features whose sum is released."""
    return CosineMoments(shape, **settings.model_dump(exclude={"noise"}))


def save_covariance(moments: ClassMoments, directory: Path) -> None:
    """Write the release and what rebuilds its features."""
    save_tensors({"covariance": moments.table.contiguous()}, directory / MOMENTS)
    write_json(directory / ABOUT, {**moments.features.arguments, "deviation": moments.deviation})


def load_covariance(directory: Path) -> ClassMoments:
    """The inverse. Raises DataError where files are missing or do not fit."""
    with explained(DataError, lambda error: f"{directory} holds no release ({error!r}): run `stage covariance` again"):
        about = read_json(directory / ABOUT)
        deviation, shape = float(about.pop("deviation")), tuple(about.pop("shape"))
        return ClassMoments(load_tensors(directory / MOMENTS)["covariance"], CosineMoments(shape, **about), deviation)
