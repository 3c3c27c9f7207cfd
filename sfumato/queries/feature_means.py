"""Noisy class means of a bounded feature map φ.

The stages frequency, moments, covariance and embedding use this query. All maps are differentiable,
so that a generator can be fitted to the release. A query may draw precomputed feature vectors of
the sensitive images instead of their pixels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from sfumato.data.cards import Side
from sfumato.data.images import ImageSet, Shape, to_device
from sfumato.data.store import Encode
from sfumato.errors import DataError, explained
from sfumato.features import CELLS, CLASSIFIER, FeatureMeans
from sfumato.features.batch_invariant import place_matters, rows_alone
from sfumato.features.cosine import CosineMoments
from sfumato.features.fourier import FourierFeatures
from sfumato.features.own_network import OwnFeatures, check_rows
from sfumato.features.projection import ClassifierFeatures, ProjectedFeatures, ScaleToSqrtD
from sfumato.features.public_network import PublicNetwork, arguments_of, build_network
from sfumato.features.teacher_network import FITTED, TeacherNetwork, relabelled
from sfumato.privacy.resolved import StagePlan
from sfumato.privacy.rows import Rows, label_rows
from sfumato.runtime.compute import device_of
from sfumato.runtime.progress import Progress
from sfumato.settings.fields import Settings, Strict
from sfumato.settings.queries import FeatureMap
from sfumato.settings.training import Classifier
from sfumato.storage.documents import read_json, validated
from sfumato.storage.files import write_json
from sfumato.storage.weights import load_network, load_tensors, save_network, save_tensors
from sfumato.training.public_classifier import train_public_classifier

if TYPE_CHECKING:
    from sfumato.privacy.charge import Charge

# `moments` (DP-MEPF): the squared features contribute this share of a row's squared norm
SQUARES = 0.5
# Arguments of CosineMoments in `covariance`
COSINE = {"frequencies": 64, "contrasts": 16, "bound": 0.3, "products": 0.7}
LENGTH_SCALES = (1.22, 0.63)  # Length scales of `embedding`, in units of √d for d features
# `embedding`: the teacher's features contribute this share of a row's squared norm
TEACHER = 0.5
LEARNED = Classifier(network="whitened", width=32, learning_rate=0.1)  # Network of `embedding`
EMBEDDING_DIMENSION = 512  # Number of principal directions of the features of LEARNED

# φ: (B, C, H, W) float32 in [0, 1] -> (B, K) float32, of norm at most 1
Features = FourierFeatures | CosineMoments


@torch.no_grad()
def query_feature_means(
    charge: Charge, features: Any, classes: int, public_size: float, *, cached: bool = False
) -> Tensor:
    """Release Σ φ(x) ⊗ onehot(y) over all sensitive images, divided by a public size.

    features: the map φ; rows and their float64 sum are computed on the device of `features`;
    public_size: N̄, the public number of images, never the exact number;
    cached: whether the charge draws `features.vectors` of the images instead of the images.

    Returns (K, classes) float32 on the CPU, for `fit_generator`; with several labels,
    (K, classes + 1), because of the extra column of `label_rows`.

    Guarantee: adding or removing one image changes the sum by at most 1 in L2, because both φ and
    the row of the image's labels have norm at most 1. A row is a function of its image only, to the
    last bit.

    Source: FETA-Pro Eq. 5.
    """
    device = device_of(features)
    matters = not cached and place_matters(features, features.shape, device)

    def rows_of(drawn: Tensor, labels: Tensor) -> Rows:
        drawn = to_device(drawn, device)
        if cached:
            rows = features.from_maps(drawn.double())
        else:
            rows = rows_alone(features, drawn, matters)
        return Rows(rows, label_rows(to_device(labels, device), classes))

    return (charge.sum(rows_of, 1.0, size=512) / public_size).float()


def cosine_moments(shape: Shape, flip: bool) -> CosineMoments:
    """Build the map of an image's low frequencies and their products.

    flip: whether an image and its mirror image get the same row.
    """
    return CosineMoments(shape, **COSINE, flip=flip)  # type: ignore[arg-type]


def moment_features(
    network: PublicNetwork, feature: str = CLASSIFIER, squares: float = SQUARES
) -> FourierFeatures:
    """Build a map from images to a public network's features and their squares.

    The map is (B, C, H, W) -> (B, K), and K is twice the number of features. Features are scaled to
    norm √(1 − `squares`) and their squares to norm √`squares`, so that one Gaussian with
    sensitivity 1 covers both.

    feature: CLASSIFIER or CELLS (see `sfumato.features.projection`);
    squares: how much of a row's squared norm comes from the squared features, in [0, 1). If it is
    0, a row has no squared features, and K is the number of features.

    Source: Harder et al. 2023 (DP-MEPF).
    """
    parts = [FeatureMap(map="network", kernel="linear", weight=1 - squares)]
    if squares > 0:
        parts.append(FeatureMap(map="network", kernel="squared", weight=squares))
    features = ClassifierFeatures(network, feature == CELLS).eval()
    return FourierFeatures(network.shape, parts, 2, seed=0, maps={"network": lambda _: features})


def train_feature_network(
    images: ImageSet, teacher: TeacherNetwork, steps: int, seed: int, report: Progress
) -> ProjectedFeatures:
    """Train a feature map on images of a generator, labelled by the teacher. This is free."""
    settings = LEARNED.model_copy(update={"steps": steps})
    network, _ = train_public_classifier(relabelled(teacher, images), settings, seed, report)
    features = ProjectedFeatures(CELLS, images.shape, EMBEDDING_DIMENSION, network)
    features.fit(images.some(FITTED, seed), power=0.5, seed=seed)
    return features


def learned_features(
    teacher: ProjectedFeatures,
    network: ProjectedFeatures,
    size: int,
    seed: int,
    length_scales: tuple[float, ...] = LENGTH_SCALES,
    share: float = TEACHER,
) -> FourierFeatures:
    """Build Fourier features of the teacher's map and of a trained network's map.

    A release of these features depends on the charges of both maps.

    size: number of Fourier features;
    share: share of the teacher's features in a row's squared norm.
    """
    maps = {"teacher": (teacher, share), "network": (network, 1 - share)}
    features = [
        FeatureMap(map=name, length_scales=length_scales, weight=part)
        for name, (_, part) in maps.items()
    ]
    makers = {
        name: lambda shape, projection=projection: ScaleToSqrtD(projection)
        for name, (projection, _) in maps.items()
    }
    return FourierFeatures(teacher.shape, features, size, seed, makers)


Part = Annotated[float, Field(gt=0, lt=1)]


class About(Strict):
    """Form of `features.json`. Each stage has a subclass."""

    # Class of the features. `rebuild` passes all fields of the form except `deviation` to it.
    # A subclass that overrides `rebuild` does not set `kind`
    kind: ClassVar[type[FourierFeatures] | type[CosineMoments]]
    tensor: ClassVar[str] = "embedding"  # name of the released tensor and of its file
    deviation: PositiveFloat | None  # standard deviation of the noise (see `FeatureMeans`)

    def rebuild(self, folder: Path, teacher: ProjectedFeatures | None) -> Features:
        """Rebuild the features from the files in `folder`.

        teacher: the teacher's feature map, needed for `embedding` only.
        """
        return self.kind(**{name: value for name, value in self if name != "deviation"})


class AboutFourier(About):
    kind = FourierFeatures
    shape: tuple[Side, Side, Side]
    size: PositiveInt
    seed: int
    features: tuple[FeatureMap, ...]


class AboutCosine(About):
    kind = CosineMoments
    tensor = "covariance"
    shape: tuple[Side, Side, Side]
    frequencies: PositiveInt
    contrasts: Annotated[int, Field(ge=0)]
    bound: PositiveFloat
    products: Part
    flip: bool


class AboutMoments(About):
    tensor = "moments"
    feature: Literal["classifier", "cells"]
    squares: Annotated[float, Field(ge=0, lt=1)]

    def rebuild(self, folder: Path, teacher: ProjectedFeatures | None) -> FourierFeatures:
        return moment_features(
            load_network(folder, build_network, "moments").eval(), self.feature, self.squares
        )


class AboutLearned(About):
    size: PositiveInt
    seed: int
    length_scales: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    teacher: Part

    def rebuild(self, folder: Path, teacher: ProjectedFeatures | None) -> FourierFeatures:
        if teacher is None:
            raise ValueError(
                "the features of `embedding` cannot be rebuilt without the teacher's feature map"
            )
        network = load_network(folder, ProjectedFeatures, "embedding").eval()
        return learned_features(
            teacher, network, self.size, self.seed, self.length_scales, self.teacher
        )


KIND_OF: dict[str, type[About]] = {  # Form of features.json, by stage
    "frequency": AboutFourier,
    "moments": AboutMoments,
    "covariance": AboutCosine,
    "embedding": AboutLearned,
}


def save_means(
    stage: str,
    means: FeatureMeans,
    about: Mapping[str, object],
    folder: Path,
    network: PublicNetwork | ProjectedFeatures | None = None,
) -> None:
    """Write the release, and the files from which its features can be rebuilt.

    about: content of features.json; network: network of the features, if they have one.
    """
    tensor = KIND_OF[stage].tensor
    save_tensors({tensor: means.table.contiguous()}, folder / f"{tensor}.safetensors")
    write_json(folder / "features.json", {**about, "deviation": means.deviation})
    if isinstance(network, ProjectedFeatures):
        save_network(network, network.config(), folder)
    elif network is not None:
        save_network(network, arguments_of(network), folder)


def load_means(
    stage: str, folder: Path, teacher: ProjectedFeatures | None = None, *, plan: StagePlan[Settings]
) -> FeatureMeans:
    """Load what `save_means` wrote.

    teacher: the teacher's feature map, needed for `embedding` only. Raises DataError if files are
    missing or invalid, or do not match each other or `plan`.
    """
    kind = KIND_OF[stage]
    with explained(
        DataError,
        lambda error: f"{folder} has no valid {kind.tensor} ({error!r}): run `stage {stage}` again",
    ):
        about = validated(kind, read_json(folder / "features.json"))
        table = load_tensors(folder / f"{kind.tensor}.safetensors")[kind.tensor]
        shape = getattr(about, "shape", plan.shape)
        # Checked before `rebuild`, which could allocate far too much memory for wrong numbers
        if shape != plan.shape:
            raise ValueError(f"features.json is for images of shape {shape}, expected {plan.shape}")
        if (size := getattr(about, "size", 0)) > len(table):
            raise ValueError(
                f"features.json states {size} features, but the release has only {len(table)}"
            )
        features = about.rebuild(folder, teacher)
        expected = (features.size, len(plan.classes) + plan.several)
        if table.shape != expected or table.dtype != torch.float32 or features.shape != plan.shape:
            raise ValueError(
                f"the release is {table.dtype} of shape {(*table.shape,)}, expected torch.float32 "
                f"of shape {expected}"
            )
        return FeatureMeans(table, features, about.deviation)


def encoder_of(map: nn.Module, arguments: Mapping[str, object]) -> str:
    """Return a digest of a map's arguments and state, which identifies the map as an encoder."""
    digest = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode())
    for name, tensor in sorted(map.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def encoding_alone(
    function: Callable[[Tensor], Tensor], shape: Shape, device: torch.device
) -> Encode:
    """Turn a map into an encoder that runs on `device`, from images (B, C, H, W) to rows
    (B, d).

    Guarantee: a row is a function of its image only.
    """
    owner = getattr(function, "__self__", function)  # the module, or the object of a bound method
    networks = [
        part for part in getattr(owner, "modules", tuple)() if isinstance(part, OwnFeatures)
    ]
    for network in networks:
        check_rows(network, shape, device)
    matters = bool(networks) or place_matters(function, shape, device)
    return lambda images: rows_alone(function, images.to(device), matters)
