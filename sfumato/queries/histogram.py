"""Noisy class histogram: how many sensitive images a classifier assigns to each class.

The classifier and its classes are public. Counts are never divided by the number of images that
voted, because this number is private and is not needed to choose classes.

Source: RPGen stage 1; PrivImage.
"""

import math

import torch
from torch import Tensor

from sfumato.features.batch_invariant import place_matters, rows_alone
from sfumato.features.public_network import PublicNetwork
from sfumato.privacy.charge import Charge
from sfumato.privacy.rows import Rows, one_hot


def vote_rows(logits: Tensor, labels: Tensor, votes: int, classes: int | None = None) -> Rows:
    """Compute the votes of a batch.

    Each image gives one vote to each of its `votes` likeliest public classes. Ties are resolved in
    class order. An image does not vote if a logit is not finite or, with `classes`, if its label is
    out of range.

    logits: (B, P) for P public classes, computed by `rows_alone`;
    labels: (B,) int64;
    classes: number of sensitive classes, to count votes separately for each (PrivImage), or None to
    count them together (RPGen).

    Returns (B, classes or 1) ⊗ (B, P), whole numbers, of norm √votes.
    """
    finite = logits.isfinite().all(dim=1)
    likeliest = torch.where(finite[:, None], logits, 0).argsort(
        dim=1, descending=True, stable=True
    )[:, :votes]
    # (B, P)
    ballots = (
        torch.zeros_like(logits, dtype=torch.float64).scatter_(1, likeliest, 1) * finite[:, None]
    )
    if classes is None:
        return Rows(torch.ones_like(ballots[:, :1]), ballots)
    return Rows(one_hot(labels, classes), ballots)


def query_histogram(
    charge: Charge, model: PublicNetwork, votes: int, classes: int | None = None
) -> Tensor:
    """Release noisy votes for every public class.

    The charge covers one Gaussian mechanism, possibly over a Poisson draw. `rows_alone` computes
    the logits of an image from that image only. In an ordinary batch, rounding could make logits
    depend on the number of drawn images. Removing one image could then change the votes of other
    images for which two classes nearly tie.

    model: classifier in eval mode;
    votes: see `vote_rows`;
    classes: see `vote_rows`.

    Returns (classes or 1, P) float64, possibly negative. Before any draw, raises ValueError if the
    model is in training mode, or if `votes` exceeds the number of public classes.
    """
    if model.training:
        raise ValueError(
            "the classifier is in training mode, in which images change each other's logits: call "
            "eval()"
        )
    if not 1 <= votes <= model.classes:
        raise ValueError(
            f"histogram.votes={votes}: expected 1 to {model.classes}, the number of public classes"
        )
    device = model.head.weight.device
    matters = place_matters(model, model.shape, device)

    def rows_of(images: Tensor, labels: Tensor) -> Rows:
        logits = rows_alone(model, images.to(device), matters)
        return vote_rows(logits.cpu(), labels, votes, classes)

    return charge.sum(rows_of, math.sqrt(votes), size=512, integer=True)
