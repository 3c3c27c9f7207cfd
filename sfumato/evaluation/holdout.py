"""What of a hold-out may judge a release: pictures that are not in training too, and differ. All of it is local."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.data.images import ImageSet
from sfumato.data.lineage import digests
from sfumato.runtime import distributed

GRID, ROWS = 16, 2048  # side at which pictures are compared; pictures of training at a time
# of copies at other sizes, nearly all correlate by more than ALIKE; of other pictures, three in a thousand at most
ALIKE, LOOK_ALIKES = 0.9975, 0.01


def without_copies(holdout: ImageSet, train: ImageSet) -> tuple[ImageSet, list[str]]:
    """The hold-out without pictures that are in training too, and a warning with their number if there are any.

    A copy has the same bytes; or it was resized and looks like one, if more than LOOK_ALIKES of the hold-out do: a few
    may be other pictures. A collective call: the first process decides.
    """
    copied = distributed.broadcast_object(copies(holdout, train) if distributed.is_main() else np.empty(0, bool))
    if not copied.any():
        return holdout, []
    rows = np.flatnonzero(~copied)
    groups = None if holdout.groups is None else holdout.groups[rows]
    left = ImageSet(holdout.images[rows], holdout.labels[rows], holdout.classes, groups)
    return left, [
        f"{copied.sum()} of {len(holdout)} hold-out images are copies of training images, as they are or resized: they "
        "are left out of all numbers here. Give other pictures in test/, or join it with train/ for a keyed hold-out"
    ]


def copies(holdout: ImageSet, train: ImageSet) -> np.ndarray:
    """Which hold-out images are copies of training images, (n,) bool, as `without_copies` has them."""
    known = {*digests(train.images)}
    copied = np.array([value in known for value in digests(holdout.images)], dtype=bool)
    sought = small(holdout.images)
    alike = np.zeros(len(holdout), dtype=bool)
    for start in range(0, len(train) if len(holdout) else 0, ROWS):
        alike |= (sought @ small(train.images[start : start + ROWS]).T).amax(dim=1).numpy() > ALIKE
    return copied | alike if (alike & ~copied).sum() > LOOK_ALIKES * len(holdout) else copied


def small(images: np.ndarray) -> Tensor:
    """Small grey versions of (N, H, W, C) uint8, (N, GRID²), centred, of norm 1; 0 of blank ones."""
    parts = [torch.from_numpy(np.array(images[i : i + ROWS])).float().mean(dim=3) for i in range(0, len(images), ROWS)]
    grey = torch.cat([F.adaptive_avg_pool2d(part, GRID).flatten(1) for part in parts] or [torch.zeros(0, GRID**2)])
    centred = grey - grey.mean(dim=1, keepdim=True)
    return centred / torch.linalg.vector_norm(centred, dim=1, keepdim=True).clamp(min=1e-3)


def unusable(holdout: ImageSet) -> str | None:
    """Why nothing can be measured with this hold-out; None if it can."""
    seen = zip(digests(holdout.images), holdout.images, strict=True)
    different = {value for value, image in seen if (image != image[0, 0]).any()}
    if len(different) < 2:
        return f"the hold-out holds {len(holdout)} images, and {len(different)} that differ and are not blank"
    if holdout.labels.ndim == 1 and len(np.unique(holdout.labels)) < 2:
        return "all images of the hold-out are of one class"
    return None
