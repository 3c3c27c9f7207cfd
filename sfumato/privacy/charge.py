"""The door to sensitive images: no charge, no data.

`open_charge` checks the budget, writes the odometer, and returns the only object that draws sensitive batches and adds noise.
`open_local` is the other door, for work outside the guarantee: journalled, and everything made with it is marked local.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from dp_accounting import DpEvent
from filelock import FileLock, Timeout
from torch import Tensor

from sfumato.data.images import ImageSet
from sfumato.data.latents import LatentSet, load_latents
from sfumato.data.store import Card, load_prepared
from sfumato.digest import digest_of
from sfumato.errors import BudgetError
from sfumato.privacy.accountant import epsilon
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, ZERO_OUT_ONE, Mechanism, event_to_json
from sfumato.privacy.noise import NoiseSource
from sfumato.privacy.odometer import ABANDON, CLOSE, LOCAL, OPEN, PROGRESS, Odometer
from sfumato.privacy.sampling import poisson_draw

UNIT = "one (image, label)"
DAY = 86_400  # seconds; a record says no more of when it was made: two exact times would tell how long a query took, and so how many images it saw
VERSIONED = ("sfumato", "torch", "numpy", "dp-accounting", "randomgen")


class AlreadyReleasedError(BudgetError):
    """The same work was released before, by the charge `record_id`."""

    def __init__(self, record_id: str, message: str) -> None:
        super().__init__(message)
        self.record_id = record_id


@dataclass(frozen=True, kw_only=True)
class Permission:
    """What the owner allows beyond the plan of one stage. It is no part of any plan, so changing it re-runs nothing."""

    delta: float
    spend_again: bool = False
    lifetime_epsilon: float | None = None
    declared_size: bool = False


class Charge:
    """One mechanism's uses, each a draw and then a release; the (uses + 1)-th is refused.

    Made by `open_charge` alone. Not thread-safe; not to be copied (its noise source refuses).
    """

    def __init__(
        self,
        images: ImageSet | LatentSet,
        mechanism: Mechanism,
        record: dict,
        odometer: Odometer,
        noise: NoiseSource,
        used: int,
        run: Path,
        lock: ExitStack,
    ):
        self.record = record
        self.used = used  # uses completed, those of an earlier process included
        self.run = run
        self._images, self._mechanism, self._odometer, self._noise, self._lock = (
            images,
            mechanism,
            odometer,
            noise,
            lock,
        )
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

        Yields ((B, C, H, W) float32, (B,) int64), images in [0, 1] or their latents; an empty draw yields nothing and is a draw all the same.
        Raises BudgetError when all uses are spent or the last draw was not released.
        """
        if self._closed or self.used >= self.uses:
            raise BudgetError(
                f"{self.record['stage']}: the charge covers {self.uses} releases and all are used; a further draw needs a new charge"
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


def open_charge(
    *,
    state: Path,
    card: Card,
    stage: str,
    plan: str,
    inputs: Sequence[str] = (),
    mechanism: Mechanism,
    permission: Permission,
    released: str,
    sensitivity: str,
    resumable: bool = False,
    noise: NoiseSource | None = None,
    latents: str | None = None,
) -> Charge:
    """Open a charge: refuse, or journal the whole of it and hand out the door.

    `plan` is the digest of the stage's resolved configuration, `inputs` those of the artifacts it reads: the same plan on the
    same inputs and images is the same work, and is refused once it was released. With `resumable`, the same work that a kill left
    open is continued at its last durable use, at no further cost; the caller restores its state from `charge.run`. `latents` names
    what `sfumato.data.latents` keeps of the same images, to be drawn in their place: same images, same draw, same record.
    Raises BudgetError: already released, over the lifetime budget, in use by another process; DataError: no images.
    """
    work = digest_of({"plan": plan, "inputs": sorted(inputs)})
    noise = noise or NoiseSource()
    images = load_latents(state, card, latents) if latents else load_prepared(state, card, "sensitive")
    odometer = Odometer(state, card.dataset_id)
    with odometer.locked(), ExitStack() as stack:
        if (done := odometer.closed(card.fingerprint, work=work)) and not permission.spend_again:
            raise AlreadyReleasedError(
                done,
                f"{stage}: already released as {done} for dataset {card.dataset_id!r} under this very plan. "
                "Restore it (`dvc checkout`, `dvc pull`), or set privacy.spend_again: true to pay for it once more",
            )
        left = odometer.unfinished(work, card.fingerprint) if resumable else None
        resumed = left is not None and left[0]["noise_source"] == noise.label
        if left is not None and resumed:
            record, used = left
        else:
            record, used = _new_record(card, stage, plan, mechanism, permission, released, sensitivity, noise.label), 0
            check_lifetime(odometer, [mechanism.event], permission)
        run = state / "runs" / record["id"]
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            stack.enter_context(FileLock(run / "lock", blocking=False))
        except Timeout as error:
            raise BudgetError(
                f"{stage}: run {record['id']} is held by another process: wait for it, or stop it"
            ) from error
        if not resumed:
            odometer.append(OPEN, plan=plan, work=work, record=record)
        return Charge(images, mechanism, record, odometer, noise, used, run, stack.pop_all())


def open_local(state: Path, card: Card, purpose: str) -> tuple[ImageSet, ImageSet]:
    """The sensitive and the hold-out images, for work outside the guarantee. Journalled; what comes of it must be marked local."""
    sensitive, holdout = load_prepared(state, card, "sensitive"), load_prepared(state, card, "holdout")
    Odometer(state, card.dataset_id).append(LOCAL, purpose=purpose)
    return sensitive, holdout


def _new_record(
    card: Card,
    stage: str,
    plan: str,
    mechanism: Mechanism,
    permission: Permission,
    released: str,
    sensitivity: str,
    noise: str,
) -> dict:
    return {
        "id": secrets.token_hex(16),
        "stage": stage,
        "dataset_id": card.dataset_id,
        "fingerprint": card.fingerprint,
        "unit": UNIT,
        "adjacency": ZERO_OUT_ONE if permission.declared_size else ADD_OR_REMOVE_ONE,
        "event": event_to_json(mechanism.event),
        "released": released,
        "sensitivity": sensitivity,
        "noise_source": noise,
        "plan": plan,
        "versions": {name: _version(name) for name in VERSIONED},
        "time": int(time.time()) // DAY * DAY,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def check_lifetime(odometer: Odometer, events: Sequence[DpEvent], permission: Permission) -> None:
    """Raise BudgetError where everything ever opened and `events`, which are to come, exceed the lifetime budget."""
    if permission.lifetime_epsilon is None:
        return
    adjacency = ZERO_OUT_ONE if permission.declared_size else ADD_OR_REMOVE_ONE
    total = epsilon([*odometer.events(), *events], permission.delta, "rdp", adjacency)
    if total > permission.lifetime_epsilon:
        raise BudgetError(
            f"privacy.lifetime_epsilon={permission.lifetime_epsilon:g} of dataset {odometer.dataset_id!r} would be exceeded: "
            f"everything ever opened and what is to come make {total:.4g} at delta={permission.delta:.3g} (`stage ledger history` lists it)"
        )
