"""Noisy class histogram: how many sensitive images a public classifier puts into each public class.

Counts are never divided by how many images voted: that number is private, and choosing classes does not need it.
Source: RPGen stage 1; PrivImage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfumato.features.public_network import ResNet
from sfumato.queries.count import membership

if TYPE_CHECKING:
    from sfumato.privacy.charge import Charge


def vote_sum(logits: Tensor, labels: Tensor, votes: int, classes: int | None = None) -> Tensor:
    """Votes of a batch: each image gives 1 to each of its `votes` likeliest public classes. Ties go in class order.

    logits: (B, P), row i made from image i alone (`lone_logits`); labels: (B,) int64; classes: number of sensitive
    classes, for one row each (PrivImage), or None for one row in all (RPGen). Returns (classes or 1, P) float64, whole
    numbers.
    Guarantee: one image more or less changes the sum by at most √votes in L2: it adds 1 to `votes` different cells. An
    image with a logit that is not finite does not vote. Where each sensitive class has its row, an image whose label is
    out of range does not vote either.
    """
    check_votes(votes, logits.shape[1])
    finite = logits.isfinite().all(dim=1)
    likeliest = torch.where(finite[:, None], logits, 0).argsort(dim=1, descending=True, stable=True)[:, :votes]
    ballots = (
        torch.zeros(logits.shape, dtype=torch.float64, device=logits.device).scatter_(1, likeliest, 1) * finite[:, None]
    )  # (B, P)
    rows = torch.ones_like(ballots[:, :1]) if classes is None else membership(labels, classes)
    return rows.T @ ballots


def lone_logits(model: ResNet, images: Tensor) -> Tensor:
    """Logits of every image, one image at a time: (B, C, H, W) float32 in [0, 1], any memory format -> (B, P) float32.

    Guarantee: row i is a function of image i alone, to the last bit. Matrix kernels round differently for another batch
    size, layout, alignment or number of threads. Where two classes nearly tie, an image's votes could then depend on
    how many others were drawn, and removing one image would move more than its own votes. So each goes through the same
    memory, as a batch of one, on one thread. An image with any non-finite pixel gives a row of NaN.
    """
    if model.training:
        raise ValueError(
            "the classifier is in training mode, where one image changes the next one's logits: call eval() first"
        )
    weight = model.head.weight
    logits = torch.empty(len(images), model.classes, device=weight.device)
    seat = torch.empty(1, *model.shape, device=weight.device)
    with torch.no_grad(), one_thread(), torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        for row, image in zip(logits, images, strict=True):
            row.copy_(model(seat.copy_(image))[0])
    broken = ~images.flatten(1).isfinite().all(dim=1).to(logits.device)
    return logits.masked_fill_(broken[:, None], float("nan"))


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch on one thread.

    For a batch of one, several threads cost more than they bring, and they may split a sum in different ways.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def query_histogram(charge: Charge, model: ResNet, votes: int, classes: int | None = None) -> Tensor:
    """The one release: noisy votes for every public class. `charge` holds one Gaussian, perhaps of a Poisson draw.

    model: trained on public images, in eval mode; votes, classes: as in `vote_sum`. Returns (classes or 1, P) float64,
    some perhaps negative, divided by nothing.
    Raises ValueError, before any draw, where `votes` exceeds the number of public classes.
    """
    check_votes(votes, model.classes)
    total = torch.zeros(classes or 1, model.classes, dtype=torch.float64)
    for images, labels in charge.batches(size=512):
        total += vote_sum(lone_logits(model, images).cpu(), labels, votes, classes)
    return charge.release(total, max_norm=math.sqrt(votes), whole=True)


def check_votes(votes: int, public_classes: int) -> None:
    if not 1 <= votes <= public_classes:
        raise ValueError(f"histogram.votes={votes}: expected 1 to {public_classes}, the number of public classes")
