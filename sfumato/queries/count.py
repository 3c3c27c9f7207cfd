"""Noisy class counts.

The counts give the public number of images, the denominators of other queries, and the class
priors.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from sfumato.errors import DataError, explained
from sfumato.privacy.charge import Charge
from sfumato.privacy.rows import Rows, label_rows, one_hot
from sfumato.settings.fields import PositiveFloat
from sfumato.storage.artifacts import Artifact
from sfumato.storage.documents import read_json, validated
from sfumato.storage.files import write_json


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Form of `counts.json`."""

    total: PositiveFloat
    per_class: tuple[PositiveFloat, ...]
    priors: tuple[Annotated[float, Field(ge=0, le=1)], ...]
    noisy: tuple[Annotated[float, Field(ge=-1e10, le=1e10)], ...] = ()
    row_means: tuple[NonNegativeFloat, ...] | None = None


class PublicCounts(NamedTuple):
    total: float  # N̄, the public number of images
    # N̄_m, the public number of images of each class m: (classes,) float64.
    # Each number is at least 1, because it is used as a denominator.
    per_class: Tensor
    # (classes,) float64, non-negative. If each image has one label, the sum is 1.
    # If images have several labels: share of the images with each label; the sum can differ from 1.
    priors: Tensor
    # With several labels: mean of `label_rows`, (classes + 1,) float64
    row_means: Tensor | None = None


def query_count(charge: Charge, classes: int) -> Tensor:
    """Release noisy class counts, (classes,) float64, possibly negative.

    An image adds 1 to its class. `public_counts` turns the result into denominators and priors.
    """
    return charge.sum(
        lambda _, labels: Rows(one_hot(labels, classes)),
        1.0,
        size=4096,
        integer=True,
        labels_only=True,
    )


def several_bound(classes: int) -> float:
    """Return √(classes + 2), the norm of the longest row of `several_rows`.

    An image with all labels has a row of this norm.
    """
    return math.sqrt(classes + 2)


def several_rows(labels: Tensor, classes: int) -> Tensor:
    """Build rows for several labels: the image's labels, a 1, and its row of `label_rows`.

    labels: (B, classes) of 0 and 1. Returns (B, 2·classes + 2) float64.

    Guarantee: an image with k labels has a row of norm √(k + 2), so no row is longer than
    `several_bound`.
    """
    return torch.cat(
        [(labels == 1).double(), torch.ones(len(labels), 1), label_rows(labels, classes)], dim=1
    )


def query_several(charge: Charge, classes: int) -> Tensor:
    """Release the noisy sum of `several_rows`, (2·classes + 2,) float64."""
    bound = several_bound(classes)
    return charge.sum(
        lambda _, labels: Rows(several_rows(labels, classes)), bound, size=4096, labels_only=True
    )


def public_several(noisy: Tensor, noise_multiplier: float) -> PublicCounts:
    """Compute the public counts from a release of `query_several`.

    The noise in the release has the standard deviation noise_multiplier · `several_bound`.
    """
    classes = len(noisy) // 2 - 1
    floor = max(1.0, noise_multiplier * several_bound(classes))
    total = max(noisy[classes].item(), floor)
    shares = (noisy / total).clamp(0, 1)
    return PublicCounts(
        total, noisy[:classes].clamp(min=floor), shares[:classes], shares[classes + 1 :]
    )


def public_counts(noisy: Tensor, noise_multiplier: float) -> PublicCounts:
    """Turn noisy counts into public numbers of images and priors.

    This is post-processing, so it is free. The public number of images of class m is
    N̄_m = max(noisy count, 1, σ). A count below σ is mostly noise, and a small denominator would
    amplify this noise. The public number N̄ of all images is the unbiased sum of the noisy counts,
    but at least 1 and at least σ. The priors are proportional to the noisy counts, clipped at 0. If
    all clipped counts are 0, the priors are uniform.
    """
    noisy = noisy.double()
    floor = max(1.0, noise_multiplier)
    priors = noisy.clamp(min=0)
    if priors.sum() <= 0:
        priors = torch.ones_like(noisy)
    priors = priors / priors.sum()
    return PublicCounts(max(noisy.sum().item(), floor), noisy.clamp(min=floor), priors)


def save_counts(counts: PublicCounts, noisy: Tensor, directory: Path) -> None:
    content = {
        "total": counts.total,
        "per_class": counts.per_class.tolist(),
        "priors": counts.priors.tolist(),
    }
    content["noisy"] = noisy.tolist()
    if counts.row_means is not None:
        content["row_means"] = counts.row_means.tolist()
    write_json(directory / "counts.json", content)


def read_counts(count: Artifact, size_hint: int, classes: int) -> PublicCounts:
    """Read the noisy counts. If `count` is off, divide the size hint equally among the classes."""
    if not count.enabled:
        even = torch.full((classes,), 1 / classes).double()
        return PublicCounts(
            float(size_hint), torch.full((classes,), size_hint / classes).double(), even
        )
    with explained(
        DataError,
        lambda error: f"{count.path} has no valid counts ({error}): run `stage count` again",
    ):
        counts = validated(Counts, read_json(count.path / "counts.json"))
        if {len(counts.per_class), len(counts.priors)} != {classes}:
            raise ValueError(f"expected {classes} classes")
    tensors = [torch.tensor(counts.per_class).double(), torch.tensor(counts.priors).double()]
    if counts.row_means is not None:
        tensors.append(torch.tensor(counts.row_means).double())
    return PublicCounts(counts.total, *tensors)
