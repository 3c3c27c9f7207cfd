"""Train the teacher: noisy gradient steps of a linear classifier on public features."""

import math
from functools import partial

import torch
from torch import Tensor

from sfumato.data.images import to_device
from sfumato.privacy.charge import Charge
from sfumato.privacy.rows import Rows, one_hot
from sfumato.runtime.progress import Progress
from sfumato.settings.queries import Teacher


def error_rows(
    weights: Tensor, rows: Tensor, labels: Tensor, offsets: Tensor | None = None
) -> Rows:
    """Compute ψ(x) ⊗ (onehot(y) − p(x)), (B, d) ⊗ (B, M), with features ψ and probabilities p.

    This is the negative gradient of the softmax loss. The norm of a row equals the norm of the
    error onehot(y) − p(x): at most √2, or at most 1 for a label out of range. If images have
    several labels, the classifier decides about each label independently, and p is the sigmoid of
    the label's logit plus its offset. A row then contains the errors of all labels, and its norm is
    at most √M. In both cases, the charge clips rows to `max_norm`.

    weights: (d, M) float64, on the device of the result;
    rows: ψ(x), (B, d), of norm 1 up to rounding;
    labels: (B,) int64, or several labels, (B, M) of 0 and 1;
    offsets: see `query_teacher`.
    """
    rows, labels = (to_device(part, weights.device) for part in (rows, labels))
    logits = rows.double() @ weights
    if labels.ndim == 2:
        if offsets is not None:
            logits += offsets
        return Rows(rows, (labels == 1).double() - logits.sigmoid())
    return Rows(rows, one_hot(labels, weights.shape[1]) - logits.softmax(dim=1))


@torch.no_grad()
def query_teacher(
    charge: Charge,
    settings: Teacher,
    classes: int,
    public_size: float,
    covariance: Tensor,
    report: Progress,
    offsets: Tensor | None = None,
) -> Tensor:
    """Train the teacher by noisy gradient steps from zero weights.

    The charge draws the features ψ of the images. Each step releases the noisy sum of
    `error_rows` over one draw. The result is the mean of the weights over the last steps;
    `settings.average` is their share of all steps. This averaging is post-processing.

    public_size: public expected size of a draw, never the exact size;
    covariance: (d, d), covariance of features of public or released images, which preconditions the
    steps if `settings.ridge` is set. Steps are computed on the device of this tensor;
    offsets: (M,), only if images have several labels: for each label, the logit of the released
    share of images with this label.

    Returns the weights, (d, M) float64, on the CPU.

    Guarantee: the row of an image is clipped to `settings.max_norm`, over all its labels together.
    """
    device = covariance.device
    weights = torch.zeros(len(covariance), classes, dtype=torch.float64, device=device)
    velocity = torch.zeros_like(weights)
    mean = torch.zeros_like(weights)
    averaged = 0
    precondition = torch.eye(len(covariance), dtype=torch.float64, device=device)
    if settings.ridge is not None:
        precondition = settings.ridge * torch.linalg.inv(
            covariance.double() + settings.ridge * precondition
        )
    if offsets is not None:
        offsets = torch.as_tensor(offsets, device=device)
    for step in range(charge.uses):
        released = charge.sum(
            partial(error_rows, weights, offsets=offsets), settings.max_norm, size=4096
        )
        velocity = settings.momentum * velocity + precondition @ (
            to_device(released, device) / public_size
        )
        progress = step / charge.uses
        weights = (
            weights + settings.learning_rate * (1 - (1 - settings.last_rate) * progress) * velocity
        )
        if step >= math.floor((1 - settings.average) * charge.uses):
            averaged += 1
            mean += (weights - mean) / averaged
        report(step + 1, charge.uses)
    return mean.cpu()
