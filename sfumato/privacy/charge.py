"""The door to sensitive images: no charge, no data.

A `Charge` is the only object that draws sensitive batches and adds noise. `sfumato.privacy.opening` makes it, after the
budget was checked and the whole of it was written into the odometer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from sfumato.data.images import ImageSet
from sfumato.data.store import LatentSet
from sfumato.errors import BudgetError
from sfumato.privacy.events import Mechanism
from sfumato.privacy.noise import NoiseSource
from sfumato.privacy.odometer import ABANDON, CLOSE, PROGRESS, Odometer
from sfumato.privacy.sampling import poisson_draw


class Charge:
    """One mechanism's uses, each a draw and then a release; the (uses + 1)-th is refused.

    `sfumato.privacy.opening.open_charge` alone makes it. Not thread-safe; not to be copied (its noise source refuses).
    """

    def __init__(
        self,
        record: dict,
        images: ImageSet | LatentSet,
        mechanism: Mechanism,
        *,
        odometer: Odometer,
        noise: NoiseSource,
        run: Path,
        lock: ExitStack,
        used: int = 0,
    ) -> None:
        self.record = record
        self.used = used  # uses completed, those of an earlier process included
        self.run = run
        self._images, self._mechanism, self._noise = images, mechanism, noise
        self._odometer, self._lock = odometer, lock
        self._drawn = False
        self._closed = False

    @property
    def uses(self) -> int:
        return self._mechanism.uses

    @property
    def sample_rate(self) -> float:
        """The public rate of the draws, for a public denominator."""
        return self._mechanism.sample_rate

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One Poisson draw with the mechanism's rate, in pieces of at most `size` images.

        Yields ((B, C, H, W) float32, (B,) int64), images in [0, 1] or their latents; an empty draw yields nothing and
        is a draw all the same.
        Raises BudgetError when all uses are spent or the last draw was not released.
        """
        if self._closed or self.used >= self.uses:
            raise BudgetError(
                f"{self.record['stage']}: the charge covers {self.uses} releases and all are used; "
                "a further draw needs a new charge"
            )
        if self._drawn:
            raise BudgetError(f"{self.record['stage']}: the last draw was not released: one draw, one release")
        self._drawn = True
        chosen = poisson_draw(self._noise.generator, len(self._images), self.sample_rate)
        return (self._images.batch(chosen[start : start + size]) for start in range(0, len(chosen), size))

    def release(self, total: Tensor, max_norm: float) -> Tensor:
        """`total` + N(0, (noise_multiplier · max_norm)² I), float64 where `total` is, else float32: completes the use.

        total: any shape, a sum over the images of the draw in which each moves it by at most `max_norm` in L2.
        """
        if not self._drawn:
            raise BudgetError(f"{self.record['stage']}: nothing was drawn for this release")
        if not 0 < max_norm < float("inf"):
            raise BudgetError(f"{self.record['stage']}: max_norm={max_norm} must be positive and finite")
        self._drawn = False
        self.used += 1
        total = total.detach() if total.dtype == torch.float64 else total.detach().to(torch.float32)
        return total + self._noise.gaussian_like(total, self._mechanism.noise_multiplier * max_norm)

    def durable(self) -> None:
        """Journal that the uses so far are on disk: a later process may go on from here, and from nowhere else."""
        self._odometer.append(PROGRESS, id=self.record["id"], uses=self.used)

    def abandon(self) -> None:
        """Give the charge up, its durable state being lost: it stays on the odometer and can never be resumed."""
        self._closed = True
        self._odometer.append(ABANDON, id=self.record["id"])
        self._lock.close()

    def close(self) -> None:
        """Journal that the artifact is written: this plan is released, and is refused from now on."""
        self._closed = True
        self._odometer.append(CLOSE, id=self.record["id"], uses=self.used)
        self._lock.close()
