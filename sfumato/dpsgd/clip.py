"""Clip the row of each image to a bounded norm, sum the rows, and split the sum by parameter.

The row of an image contains its gradients with respect to all trained parameters. The bound on the
effect of one image on a release depends on this module.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

RUN = 64  # Number of squares to add up in float32; the results are added up in float64
# Relative margin of a clipped norm.
# It exceeds the error of a float32 sum of RUN squares, and of the square root of this sum.
FLOAT32_SLACK = 2.0**-18
# Maximum number of entries to convert to float64 at a time, by device
NUMBERS_AT_ONCE = {"cpu": 2**20, "cuda": 2**24}


def clipped_sum(rows: Mapping[str, Tensor], max_grad_norm: float) -> Tensor:
    """Compute Σ over images of row · min(1, C/(‖row‖ + 1e-6)), without non-finite rows.

    C is `max_grad_norm`, lowered by the share FLOAT32_SLACK to cover the rounding of the norm.

    rows: (B, *shape) float32 by name. Entry i of every tensor belongs to image i only. A row that
    contains a NaN or an infinity is left out of the sum and overwritten.

    Returns (P,) float64. P is the number of entries per image in all tensors together. The sum is
    in float64, because rounding in float32 could change it by more than the bound for one image.
    The function does not wait for a GPU.

    Guarantee: adding or removing one image changes the sum by at most `max_grad_norm` in L2, for
    any content of its row.
    """
    parts = [part.flatten(1) for part in rows.values()]
    if fused := one_matrix(parts[0].device):
        parts = [torch.cat(parts, dim=1)]  # (B, P); needs ten kernels in all, not ten per parameter
    norms = torch.stack([squared_norms(part) for part in parts]).sum(0).sqrt()  # (B,)
    finite = norms.isfinite()  # a norm is finite only if all entries of its row are
    scale = torch.where(
        finite, ((1 - FLOAT32_SLACK) * max_grad_norm / (norms + 1e-6)).clamp(max=1), 0
    )
    if fused:
        parts[0].masked_fill_(~finite[:, None], 0)
    else:
        dropped = (~finite).nonzero().flatten()
        for part in parts:
            part.index_fill_(0, dropped, 0)  # zeroed, because infinity · 0 would be NaN
    width = max(1, NUMBERS_AT_ONCE[scale.device.type] // max(1, len(scale)))
    return torch.cat(
        [scale @ block.double() for part in parts for block in part.split(width, dim=1)]
    )


def one_matrix(device: torch.device) -> bool:
    """Return whether to clip all rows as one matrix.

    One matrix needs fewer kernels, but also a copy of the rows. On a CPU, the copy costs more time
    than the fewer kernels save.
    """
    return device.type == "cuda"


def squared_norms(part: Tensor) -> Tensor:
    """Compute the squared L2 norm of each row, (B, p) float32 to (B,) float64.

    Squares are added up in short runs of float32, and the runs in float64, because a float32 sum
    over 10^6 squares would understate the norm.
    """
    run_end = part.shape[1] // RUN * RUN
    # (B, runs)
    runs = torch.linalg.vector_norm(part[:, :run_end].unflatten(1, (-1, RUN)), dim=2).double()
    rest = torch.linalg.vector_norm(part[:, run_end:], dim=1).double()
    return runs.square().sum(1) + rest.square()


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split a vector of all entries, (P,), into views with the names and shapes of `like`."""
    parts = vector.split([tensor.numel() for tensor in like.values()])
    return {
        name: part.view(tensor.shape)
        for (name, tensor), part in zip(like.items(), parts, strict=True)
    }
