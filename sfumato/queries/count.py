"""Noisy class counts: the public size, the denominators of the other queries and the label priors (METHODS §2)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sfumato.artifacts import Artifact

if TYPE_CHECKING:
    from sfumato.privacy.charge import Charge


class PublicCounts(NamedTuple):
    total: float  # N̄
    per_class: Tensor  # N̄_m, (classes,) float64, each at least 1: a denominator
    priors: Tensor  # (classes,) float64, non-negative, summing to 1


def membership(labels: Tensor, classes: int) -> Tensor:
    """One-hot rows: (B,) int64 -> (B, classes) float64.

    A label out of range gives a row of zeros, so that no record can stop a query.
    """
    return (labels[:, None] == torch.arange(classes, device=labels.device)).double()


def class_counts(labels: Tensor, classes: int) -> Tensor:
    """Images per class in a batch: (B,) int64 -> (classes,) float64.

    Guarantee: one image more or less changes the counts by at most 1 in L2.
    """
    return membership(labels, classes).sum(0)


def query_count(charge: Charge, classes: int) -> Tensor:
    """The one release: noisy class counts, (classes,) float64, some perhaps negative.

    `public_counts` makes them usable.
    """
    total = torch.zeros(classes, dtype=torch.float64)
    for _, labels in charge.batches(size=4096):
        total += class_counts(labels, classes).cpu()
    return charge.release(total, max_norm=1.0, whole=True)


def public_counts(noisy: Tensor, noise_multiplier: float) -> PublicCounts:
    """Post-processing, free: noisy counts -> N̄, N̄_m and priors.

    N̄_m = max(noisy count, 1, σ): below σ a count says nothing, and a smaller denominator would only amplify the noise
    of its class. N̄ is the sum of the noisy counts before that floor (it is unbiased), with the same floor. Priors are
    clipped at 0; where nothing is left they are uniform.
    """
    noisy = noisy.double()
    floor = max(1.0, noise_multiplier)
    positive = noisy.clamp(min=0)
    priors = positive / positive.sum() if positive.sum() > 0 else torch.full_like(noisy, 1 / len(noisy))
    return PublicCounts(max(noisy.sum().item(), floor), noisy.clamp(min=floor), priors)


def save_counts(counts: PublicCounts, noisy: Tensor, directory: Path) -> None:
    content = {
        "total": counts.total,
        "per_class": counts.per_class.tolist(),
        "priors": counts.priors.tolist(),
        "noisy": noisy.tolist(),
    }
    (directory / "counts.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_counts(count: Artifact, size_hint: int, classes: int) -> PublicCounts:
    """The noisy counts; where counting is switched off, the public size hint in equal parts."""
    if not count.enabled:
        even = torch.full((classes,), 1 / classes).double()
        return PublicCounts(float(size_hint), torch.full((classes,), size_hint / classes).double(), even)
    content = json.loads((count.path / "counts.json").read_text(encoding="utf-8"))
    per_class, priors = (torch.tensor(content[key]).double() for key in ("per_class", "priors"))
    return PublicCounts(content["total"], per_class, priors)
