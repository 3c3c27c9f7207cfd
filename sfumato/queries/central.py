"""Noisy central images: the mean or the mode of each class (DP-FETA §3.1, FETA-Pro Algorithm 1).

Every release covers all classes at once. An image adds its bounded vector to the row of its class,
so one image changes the whole tensor (one row per class) by at most the bound, for classes of any
size. An empty class gets noise too.
"""

import math

import torch
from torch import Tensor

from sfumato.data.images import Shape
from sfumato.privacy.charge import Charge
from sfumato.privacy.rows import Rows, one_hot
from sfumato.settings.queries import Central


def central_norm(shape: Shape, settings: Central) -> float:
    """Return the L2 bound of one image's contribution to a release.

    The bound is `settings.max_norm`, or √d' if it is not set, with d' = C·H·W.
    """
    return settings.max_norm or math.sqrt(math.prod(shape))


def mode_rows(images: Tensor, labels: Tensor, classes: int, bins: int) -> Rows:
    """Assign every pixel of an image to one of `bins` equal bins of [0, 1].

    Returns (B, classes) ⊗ (B, bins·d'), with d' = C·H·W. Each pixel value sets one entry to 1: the
    entry of the image's class, the pixel value's bin and its position. All other entries are 0, so
    the norm is √d'. An image with any non-finite pixel gets a zero row. Values outside [0, 1] count
    in the outer bins.
    """
    rows = images.flatten(1)
    finite = rows.isfinite().all(dim=1)
    # (B, d')
    bin_of = (torch.where(finite[:, None], rows, 0.0).clamp(0, 1) * bins).long().clamp(max=bins - 1)
    # (B, bins·d')
    bits = (bin_of[:, None] == torch.arange(bins, device=rows.device)[:, None]).flatten(1).double()
    return Rows(one_hot(labels, classes) * finite[:, None], bits)


def query_central(charge: Charge, denominators: Tensor, shape: Shape, settings: Central) -> Tensor:
    """Release noisy means or per-pixel histograms of all classes, `settings.repeats` times.

    Each release has a separate draw. An image is clipped to `central_norm`.

    denominators: (classes,), public expected number of drawn images of each class (the sample rate
    times the public number of images of the class), never the exact number;
    shape: (C, H, W) of the images.

    Returns float32, not clamped to [0, 1]: (R, M, C, H, W) for the mean, (R, M, bins, C, H, W) for
    the mode, with R repeats and M classes.
    """
    classes = len(denominators)
    mode = settings.statistic == "mode"
    bound = central_norm(shape, settings)
    rows = (settings.bins, *shape) if mode else shape  # shape of one class's row

    def rows_of(images: Tensor, labels: Tensor) -> Rows:
        if mode:
            return mode_rows(images, labels, classes, settings.bins)
        return Rows(one_hot(labels, classes), images.flatten(1))

    means = []
    for _ in range(settings.repeats):
        noisy = charge.sum(rows_of, bound, size=1024, integer=mode) / denominators.double()[:, None]
        means.append(noisy.reshape(classes, *rows).float())
    return torch.stack(means)
