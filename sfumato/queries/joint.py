"""The noisy sum of features of images, by class: what `frequency` and `covariance` release, each of its features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sfumato.data.images import Shape
from sfumato.features.batch_invariant import place_matters, rows_alone
from sfumato.privacy.rows import Rows, one_hot
from sfumato.runtime import distributed
from sfumato.runtime.compute import to_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sfumato.privacy.charge import Charge


class Features(Protocol):
    """φ: (B, C, H, W) float32 in [0, 1] -> (B, K) float32, of norm 1 at most up to rounding."""

    @property
    def shape(self) -> Shape: ...

    def __call__(self, images: Tensor) -> Tensor: ...

    def buffers(self) -> Iterator[Tensor]: ...


def device_of(features: Features) -> torch.device:
    return next(features.buffers()).device


def joint_rows(features: Features, images: Tensor, labels: Tensor, classes: int, one_by_one: bool = True) -> Rows:
    """φ(x) ⊗ onehot(y): (B, C, H, W) float32 in [0, 1], (B,) int64 -> (B, K) ⊗ (B, classes). Source: FETA-Pro Eq. 5.

    A row depends on its image alone, to the last bit; one_by_one: False only where `place_matters` found that an
    image's place in a batch does not matter. Rows are made where the features are.
    """
    images, labels = (to_device(part, device_of(features)) for part in (images, labels))
    return Rows(rows_alone(features, images, one_by_one), one_hot(labels, classes))


@torch.no_grad()
def query_joint_embedding(charge: Charge, features: Features, classes: int, public_size: float) -> Tensor:
    """The one release: the joint embedding over all sensitive images, noised by the charge, over a public size.

    The rows and their sum in float64 are made where `features` are. public_size: N̄, never a realised count. Returns
    (K, classes) float32, the target of `fit_generator`, on the CPU.
    """
    matters = place_matters(features, features.shape, device_of(features))
    matters = not distributed.all_min(not matters)  # an image's row must not depend on the process that it falls to
    released = charge.sum(lambda images, labels: joint_rows(features, images, labels, classes, matters), 1.0, size=512)
    return (released / public_size).float()
