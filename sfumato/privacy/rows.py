"""Per-image contributions to a sum, and the clipped sum."""

import math
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from sfumato.errors import ConfigError
from sfumato.privacy.events import HIGHEST, LOWEST

FLOAT64_SLACK = 1e-12  # Relative error that float64 rounding may add to the norm of a clipped row


class Rows(NamedTuple):
    """One row per image, computed from that image only.

    The row of image i is left_i ⊗ right_i, or left_i if `right` is None. The norm of left_i ⊗
    right_i is the product of the two norms.

    Attributes:
        left: (B, a).
        right: (B, b).
    """

    left: Tensor
    right: Tensor | None = None


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Encode labels as one-hot rows: (B,) int64 -> (B, classes) float64.

    A label out of range becomes a row of zeros, so that no image can stop a query.
    """
    return (labels[:, None] == torch.arange(classes, device=labels.device)).double()


def label_rows(labels: Tensor, classes: int) -> Tensor:
    """Encode the labels of each image as a row of norm at most 1.

    One label per image, (B,) int64, is encoded by `one_hot` as (B, classes) float64. Several
    labels, (B, classes) of 0 and 1, are encoded as (B, classes + 1). The last column is 1 for an
    image without labels, and each row is divided by the square root of its number of ones. An entry
    other than 1 counts as 0.

    Guarantee: no row has a norm above 1, for any number of labels per image.
    """
    if labels.ndim == 1:
        return one_hot(labels, classes)
    rows = (labels == 1).double()
    rows = torch.cat([rows, (rows.sum(dim=1, keepdim=True) == 0).double()], dim=1)
    return rows / rows.sum(dim=1, keepdim=True).sqrt()


# Width, type and device of each part of rows
Form = tuple[tuple[int, torch.dtype, torch.device], ...]


def form_of(rows: Rows, count: int) -> Form:
    """Return the form of the rows of `count` images.

    Raises ConfigError unless each part is a real matrix with one row per image. With more rows than
    images, or with a part that broadcasts, one image could add several rows. Each of them would be
    within the bound, but not their sum.
    """
    parts = [rows.left] if rows.right is None else [rows.left, rows.right]
    for part in parts:
        if not isinstance(part, Tensor):
            raise ConfigError(
                f"rows are of type {type(part).__name__}: return a tensor of shape (B, K)"
            )
        if (
            part.layout != torch.strided
            or part.is_nested
            or part.is_meta
            or part.is_quantized
            or part.is_complex()
        ):
            raise ConfigError(
                f"rows are {part.dtype}, {part.layout} on {part.device}: return a dense tensor of "
                "real numbers"
            )
        if part.ndim != 2 or len(part) != count or part.shape[1] == 0:
            raise ConfigError(
                f"the rows of a batch of size {count} have the shape {tuple(part.shape)}: return "
                f"the shape ({count}, K), one row per image"
            )
    return tuple((part.shape[1], part.dtype, part.device) for part in parts)


def in_form(rows: Rows, count: int, form: Form) -> Rows:
    """Return the rows of `count` images if they have this form, otherwise rows of zeros.

    No error is raised and no warning is printed, because that would reveal the image at fault.
    """
    with suppress(ConfigError):
        if form_of(rows, count) == form:
            return rows
    return Rows(
        *(torch.zeros(count, width, dtype=dtype, device=device) for width, dtype, device in form)
    )


def bounded_sum(rows: Rows, max_norm: float, weights: Tensor | None = None) -> Tensor:
    """Sum rows over the images: (a, b) float64, or (a,) without `right`.

    Args:
        rows: Rows of B images.
        max_norm: L2 bound.
        weights: (B,) float64, factors applied to the bounded rows. The weights of one group add up
            to at most 1.

    Guarantee:
        Adding or removing one image or one group changes the sum by at most `max_norm` in L2,
        because longer rows are scaled to that norm. A row is left out if one of its entries is not
        finite or has an absolute value above 1e100. Otherwise, a broken image would turn the
        release into NaN and so reveal its presence. Absolute values below 1e-100 count as zero,
        because their squares would underflow and be missing from the norm.
    """
    parts = [part.detach().to(torch.float64, copy=True) for part in rows if part is not None]
    sound = torch.stack(
        [torch.linalg.vector_norm(part, math.inf, dim=1) <= HIGHEST for part in parts]
    ).all(dim=0)
    broken = (~sound).nonzero().flatten()
    for part, original in zip(parts, (part for part in rows if part is not None), strict=True):
        if original.dtype == torch.float64:  # other types cannot represent such small entries
            part.masked_fill_(part.abs() < LOWEST, 0)
        part.index_fill_(0, broken, 0)  # zeroed, because infinity · 0 would be NaN
    norms = torch.stack([torch.linalg.vector_norm(part, dim=1) for part in parts]).prod(dim=0)
    scale = torch.where(
        norms > max_norm, (1 - FLOAT64_SLACK) * max_norm / norms.clamp(min=max_norm), 1.0
    )
    if weights is not None:
        scale = scale * weights.to(scale)
    # With two parts, the scale multiplies the second. With one part, the sum is scale @ part.
    return parts[0].T @ (parts[1] * scale[:, None]) if len(parts) == 2 else scale @ parts[0]
