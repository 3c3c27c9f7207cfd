"""Noisy central images, the mean and the mode of each class (DP-FETA §3.1, FETA-Pro Algorithm 1).

Every release covers all classes at once: an image adds its bounded vector to the row of its own class, so one record
moves the whole (classes × d') tensor by at most the bound, whatever the class sizes. An empty class gets a row of noise
like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.data.images import Shape
from sfumato.queries.count import membership

if TYPE_CHECKING:
    from sfumato.privacy.charge import Charge


def pooled_shape(shape: Shape, pool: int) -> Shape:
    """(C, H/pool, W/pool); ValueError where pool does not divide the image."""
    channels, height, width = shape
    if height % pool or width % pool:
        raise ValueError(
            f"central.pool={pool} does not divide images of {height}×{width}: choose a divisor, or another data.size"
        )
    return channels, height // pool, width // pool


def clip_rows(rows: Tensor, max_norm: float) -> Tensor:
    """Scale each row of (B, d) to an L2 norm of at most max_norm; a row with any non-finite entry becomes zero.

    Without the zeroing, a broken image would turn the release into NaN and so reveal that it is there.
    """
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)  # no finite float32 row overflows
    clipped = rows * (max_norm / (norms + 1e-6)).clamp(max=1).to(rows)
    return torch.where(norms.isfinite(), clipped, 0)


def mean_sum(images: Tensor, labels: Tensor, classes: int, max_norm: float, pool: int = 1) -> Tensor:
    """Sum of clipped, average-pooled images per class.

    images: (B, C, H, W) float32 in [0, 1]; labels: (B,) int64. Returns (classes, d') float64, d' = C·H·W/pool².
    Guarantee: one image more or less changes the sum by at most `max_norm` in L2.
    """
    rows = F.avg_pool2d(images, pool).flatten(1).double()
    return membership(labels, classes).T @ clip_rows(rows, max_norm)


def mode_sum(images: Tensor, labels: Tensor, classes: int, bins: int, pool: int = 1) -> Tensor:
    """Histogram of every pooled pixel over `bins` equal bins of [0, 1], per class.

    images: (B, C, H, W) float32 in [0, 1]; labels: (B,) int64. Returns (classes, bins·d') float64.
    Guarantee: one image more or less changes the sum by at most √d' in L2: it is in one bin of each of d' pixels. A row
    with any non-finite entry counts nowhere; values outside [0, 1] count in the outer bins.
    """
    rows = F.avg_pool2d(images, pool).flatten(1)
    finite = rows.isfinite().all(dim=1)
    bin_of = (torch.where(finite[:, None], rows, 0.0).clamp(0, 1) * bins).long().clamp(max=bins - 1)  # (B, d')
    one_hot = (bin_of[:, None] == torch.arange(bins, device=rows.device)[:, None]).flatten(1).double()  # (B, bins·d')
    return (membership(labels, classes) * finite[:, None]).T @ one_hot


def query_central(
    charge: Charge,
    denominators: Tensor,
    shape: Shape,
    *,
    repeats: int,
    statistic: str = "mean",
    max_norm: float | None = None,
    pool: int = 1,
    bins: int = 2,
) -> Tensor:
    """`repeats` releases, each from its own draw: noisy means or per-pixel histograms of all classes.

    denominators: (classes,), public: q·N̄_m, never a realised count; shape: (C, H, W) of the images; max_norm: L2 clip
    of a pooled image, None for √d', the largest norm that an image in [0, 1] can have; bins: mode only.
    Returns float32, unclamped: mean (R, M, C, H', W'), mode (R, M, bins, C, H', W').
    """
    classes, small = len(denominators), pooled_shape(shape, pool)
    largest = math.sqrt(math.prod(small))
    rows: tuple[int, ...]  # shape of one class's row
    if statistic == "mean":
        bound, rows = (largest if max_norm is None else max_norm), small
    elif statistic == "mode":
        if max_norm is not None:
            raise ValueError(
                f"central.max_norm={max_norm} means nothing for the mode, whose bound is √d' = {largest:.4g}: "
                "leave it out"
            )
        bound, rows = largest, (bins, *small)
    else:
        raise ValueError(f"central.statistic={statistic!r}: expected mean or mode")
    per_class: Callable[[Tensor, Tensor], Tensor] = (
        (lambda images, labels: mean_sum(images, labels, classes, bound, pool))
        if statistic == "mean"
        else (lambda images, labels: mode_sum(images, labels, classes, bins, pool))
    )
    means = []
    for _ in range(repeats):
        total = torch.zeros(classes, math.prod(rows), dtype=torch.float64)
        for images, labels in charge.batches(size=1024):
            total += per_class(images, labels).cpu()
        released = charge.release(total, max_norm=bound, whole=statistic == "mode")
        noisy = released.double() / denominators.double()[:, None]
        means.append(noisy.reshape(classes, *rows).float())
    return torch.stack(means)
