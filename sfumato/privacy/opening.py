"""Open a charge: refuse it, or journal the whole of it and hand it out. Open the images for local work."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dp_accounting import DpEvent
from filelock import FileLock, Timeout

from sfumato.data.images import ImageSet
from sfumato.data.store import SENSITIVE, Card, load_latents, load_prepared
from sfumato.digest import digest_of
from sfumato.errors import BudgetError
from sfumato.privacy.accountant import epsilon
from sfumato.privacy.charge import Charge
from sfumato.privacy.events import ADD_OR_REMOVE_ONE, ZERO_OUT_ONE, Mechanism, event_to_json
from sfumato.privacy.noise import NoiseSource
from sfumato.privacy.odometer import LOCAL, OPEN, Odometer

UNIT = "one (image, label)"
DAY = 86_400  # seconds: two exact times would tell how long a query took, and so how many images it saw
VERSIONED = ("sfumato", "torch", "numpy", "dp-accounting", "randomgen")


class AlreadyReleasedError(BudgetError):
    """The same work was released before, by the charge `record_id`."""

    def __init__(self, record_id: str, message: str) -> None:
        super().__init__(message)
        self.record_id = record_id


@dataclass(frozen=True, kw_only=True)
class Permission:
    """What the owner allows beyond the plan of one stage. It is not part of a plan, so changing it re-runs nothing."""

    delta: float
    spend_again: bool = False
    lifetime_epsilon: float | None = None
    declared_size: bool = False

    @property
    def adjacency(self) -> str:
        return ZERO_OUT_ONE if self.declared_size else ADD_OR_REMOVE_ONE


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a charge is opened for: one query, by its plan, on its inputs.

    plan: digest of the resolved configuration; inputs: digests of the artifacts that it reads; released, sensitivity:
    in words, for the record; resumable: a run that a kill left open goes on, and the caller restores its state from
    `charge.run`; latents: the key of the latents that `sfumato.data.store` keeps of the same images. They are drawn in
    the images' place: same draw, same record.
    """

    stage: str
    plan: str
    mechanism: Mechanism
    released: str
    sensitivity: str
    inputs: Sequence[str] = ()
    resumable: bool = False
    latents: str | None = None

    @property
    def digest(self) -> str:
        """The same plan on the same inputs is the same work."""
        return digest_of({"plan": self.plan, "inputs": sorted(self.inputs)})


def open_charge(
    state: Path, card: Card, work: Work, permission: Permission, noise: NoiseSource | None = None
) -> Charge:
    """Open a charge for `work` on the images of `card`: refuse it, or journal the whole of it and hand it out.

    The same work on the same images is refused once it was released. Resumable work that a kill left open goes on at
    its last durable use, at no further cost. noise: only for tests.
    Raises BudgetError: already released, over the lifetime budget, in use by another process; DataError: no images.
    """
    noise = noise or NoiseSource()
    images = load_latents(state, card, work.latents) if work.latents else load_prepared(state, card, SENSITIVE)
    odometer = Odometer(state, card.dataset_id)
    with odometer.locked(), ExitStack() as stack:
        if (done := odometer.closed(card.version, work=work.digest)) and not permission.spend_again:
            raise AlreadyReleasedError(
                done,
                f"{work.stage}: already released as {done} for dataset {card.dataset_id!r} under this very plan. "
                "Restore it (`dvc checkout`, `dvc pull`), or set privacy.spend_again: true to pay for it once more",
            )
        left = odometer.unfinished(work.digest, card.version) if work.resumable else None
        if left is not None and left[0]["noise_source"] == noise.label:
            resumed, (record, used) = True, left
            if record["event"] != event_to_json(work.mechanism.event):
                raise BudgetError(
                    f"{work.stage}: run {record['id'][:8]} was opened with another mechanism than {work.mechanism}: "
                    "run `stage plan` again"
                )
        else:
            resumed, record, used = False, new_record(card, work, permission, noise.label), 0
            check_lifetime(odometer, [work.mechanism.event], permission)
        run = state / "runs" / record["id"]
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            stack.enter_context(FileLock(run / "lock", blocking=False))
        except Timeout as error:
            raise BudgetError(
                f"{work.stage}: run {record['id']} is held by another process: wait for it, or stop it"
            ) from error
        if not resumed:
            odometer.append(OPEN, plan=work.plan, work=work.digest, record=record)
        lock = stack.pop_all()
    return Charge(record, images, work.mechanism, odometer=odometer, noise=noise, run=run, lock=lock, used=used)


def open_local(state: Path, card: Card, purpose: str) -> tuple[ImageSet, ImageSet]:
    """The sensitive and the hold-out images, for work outside the guarantee.

    The call is journalled. Whatever is made with them must be marked local.
    """
    sensitive, holdout = load_prepared(state, card, SENSITIVE), load_prepared(state, card, "holdout")
    Odometer(state, card.dataset_id).append(LOCAL, purpose=purpose)
    return sensitive, holdout


def new_record(card: Card, work: Work, permission: Permission, noise_source: str) -> dict:
    return {
        "id": secrets.token_hex(16),
        "stage": work.stage,
        "dataset_id": card.dataset_id,
        "data_version": card.version,
        "unit": UNIT,
        "adjacency": permission.adjacency,
        "event": event_to_json(work.mechanism.event),
        "released": work.released,
        "sensitivity": work.sensitivity,
        "noise_source": noise_source,
        "plan": work.plan,
        "versions": {name: installed_version(name) for name in VERSIONED},
        "time": int(time.time()) // DAY * DAY,
    }


def installed_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def check_lifetime(odometer: Odometer, events: Sequence[DpEvent], permission: Permission) -> None:
    """Raise BudgetError where everything ever opened and `events`, which are to come, exceed the lifetime budget."""
    if permission.lifetime_epsilon is None:
        return
    total = epsilon([*odometer.events(), *events], permission.delta, "rdp", permission.adjacency)
    if total > permission.lifetime_epsilon:
        raise BudgetError(
            f"privacy.lifetime_epsilon={permission.lifetime_epsilon:g} of dataset {odometer.dataset_id!r} would be "
            f"exceeded: everything ever opened and what is to come make {total:.4g} at delta={permission.delta:.3g} "
            "(`stage ledger history` lists it)"
        )
