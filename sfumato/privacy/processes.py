"""Share a charge between processes.

The first process draws the images, assigns them to processes, adds the noise and writes the
journal.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sfumato.data.images import ImageSet
from sfumato.data.store import LatentSet
from sfumato.privacy.charge import Charge, Drawn
from sfumato.privacy.events import Mechanism
from sfumato.privacy.noise import NoiseSource
from sfumato.privacy.odometer import PROGRESS
from sfumato.privacy.sampling import assign_processes
from sfumato.runtime import distributed


class SharedCharge(Charge):
    """A charge in the first of several processes.

    Each process reads a part of the draw and adds up a part of the sum.
    """

    def agree(self, tensors: Iterable[Tensor], *plain: object) -> None:
        distributed.agree(tensors, *plain)

    def check_alike(self, rows: Sequence[Tensor]) -> None:
        distributed.check_alike(rows)

    def _draw(self, draws: int | None) -> Iterator[Drawn]:
        """Draw image indices, assign each entry of the draw to a process in secret, and yield the
        entries of this process. With `draws`, an entry consists of all indices of one group.
        """
        # The assignment has its own generator, so that a seeded charge draws the same images with
        # any number of processes.
        secret = NoiseSource().generator
        for chosen, weights in super()._draw(draws):
            ranks = assign_processes(secret, chosen, distributed.world_size())
            distributed.broadcast_object((chosen, weights, ranks))
            yield own_rows(chosen, weights, ranks)
        distributed.broadcast_object(None)

    def _noised(self, total: Tensor, std: float, integer: bool) -> Tensor:
        return distributed.broadcast(super()._noised(distributed.reduce_sum(total), std, integer))


class WorkerCharge(SharedCharge):
    """A charge in a process other than the first.

    It sums images that the first process drew. It does not draw, add noise or write the journal.
    """

    def __init__(self, record: dict, images: ImageSet | LatentSet, *, run: Path, used: int) -> None:
        self.record = record
        self.used = used
        self.run = run
        self._images = images
        self._mechanism = Mechanism.from_json(record["event"])
        self._drawn = self._closed = False
        self._process = os.getpid()

    def _draw(self, draws: int | None) -> Iterator[Drawn]:
        while (block := distributed.broadcast_object(None)) is not None:
            yield own_rows(*block)

    def _noised(self, total: Tensor, std: float, integer: bool) -> Tensor:
        distributed.reduce_sum(total)
        return distributed.broadcast(torch.zeros_like(total))

    def _journal(self, kind: str, **fields: object) -> None:
        """Only note whether the charge has ended. The first process writes the journal."""
        self._closed |= kind != PROGRESS


def own_rows(chosen: np.ndarray, weights: np.ndarray | None, ranks: np.ndarray) -> Drawn:
    """Return the part of the draw that belongs to this process.

    ranks: (n,), for each of the n entries of `chosen`, the rank of its process.
    """
    mask = ranks == distributed.rank()
    return chosen[mask], None if weights is None else weights[mask]
