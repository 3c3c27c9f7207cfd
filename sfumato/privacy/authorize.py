"""Open a charge, or refuse it; open the images for local work.

A charge is written to the journal completely before it is returned.
"""

import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from filelock import Timeout

from sfumato.data.cards import Card
from sfumato.data.images import ImageSet
from sfumato.data.prepare import kept_fingerprint
from sfumato.data.store import (
    SENSITIVE,
    Encode,
    LatentSet,
    have_latents,
    latents_key,
    load_latents,
    load_prepared,
    write_latents,
)
from sfumato.errors import BudgetError, ConfigError, DataError, explained
from sfumato.privacy.charge import Charge, check_norm
from sfumato.privacy.decision import RELEASED, Decision, QueryWork, decide
from sfumato.privacy.events import UNITS, Mechanism
from sfumato.privacy.noise import NoiseSource
from sfumato.privacy.odometer import CLOSE, LOCAL_USE, OPEN, RESUME, Odometer, Run, Seen
from sfumato.privacy.policy import SpendingPolicy, check_known, check_lifetime
from sfumato.privacy.processes import SharedCharge, WorkerCharge
from sfumato.runtime import distributed
from sfumato.settings.data import GROUP, IMAGE
from sfumato.settings.privacy import UNLIMITED
from sfumato.settings.stages import STAGES
from sfumato.storage.artifacts import read_kept
from sfumato.storage.files import make_folder
from sfumato.storage.in_use import in_use, use_until_the_end
from sfumato.storage.locks import file_lock, holding

# One day in seconds. Records contain only the day, because an exact time would reveal how long a
# query took, which depends on how many images it read.
DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class ChargeRequest(QueryWork):
    """One query to be charged: its settings, its inputs and its mechanism.

    max_norm: L2 bound of one image's contribution;
    released: description of the release, for the record;
    sensitivity: description of the bound, for the record;
    revision: revision of the stage;
    latents: if the query draws latents instead of images, their key in `sfumato.data.store`; the
    cost is the same;
    seen: record ids and journal heads in the project, which the journal must contain;
    unit: "image" or "group";
    group_cap: see `Charge`.
    """

    mechanism: Mechanism
    max_norm: float
    released: str
    sensitivity: str
    revision: int = 1
    latents: str | None = None
    seen: Seen = field(default_factory=Seen)
    unit: str = IMAGE
    group_cap: int = 1

    def __post_init__(self) -> None:
        check_norm(self.stage, self.max_norm)


class AlreadyReleasedError(BudgetError):
    """The same work was released before, by the run `run_id`, under the record `record_id`.

    digest: digest of the release's `privacy.json`, if the journal contains it;
    problem: reason why the kept copy of the release cannot be restored, or empty;
    pay: setting with which the owner pays for the work again;
    note: private text about images that have changed since the release, otherwise empty.
    """

    def __init__(
        self, run: Run, work: ChargeRequest, digest: str | None, problem: str = "", note: str = ""
    ) -> None:
        self.run_id = run.id
        self.record_id = run.record["id"]  # id in the ledger
        self.digest = digest
        self.problem = problem
        self.pay = work.pay
        self.note = note
        hint = (
            f"A copy is kept: if the artifact is missing or damaged, `stage {work.stage}` "
            "restores it"
        )
        super().__init__(
            f"{work.stage}: already released as {self.record_id} for dataset "
            f"{run.record['dataset_id']!r} under this plan. {problem or hint}"
        )


class RefusedElsewhereError(BudgetError):
    """Raised in every process except the first, if the first process opened no charge.

    The first process raises the error that states the reason.
    """


def open_charge(
    state: Path,
    card: Card,
    work: ChargeRequest,
    permission: SpendingPolicy,
    noise: NoiseSource | None = None,
) -> Charge:
    """Open a charge for `work` with `open_alone` in the first process, and share the charge with
    all other processes.

    The other processes get their share after the charge is journalled. If there are several
    processes, all of them must call this function. If the first process raises an error, the others
    raise RefusedElsewhereError.
    """
    if work.stage in STAGES and STAGES[work.stage].one_process and distributed.world_size() > 1:
        raise ConfigError(
            f"{work.stage} runs in one process, not in {distributed.world_size()}: unset "
            "SFUMATO_LAUNCH for this stage"
        )
    if not distributed.is_main():
        share = distributed.broadcast_object(None)
        with in_use(state, card.dataset_id):
            return open_share(state, card, work, share)
    share = None
    try:
        # `in_use` blocks `stage forget` until the charge is open. From then on, the lock of the run
        # blocks it
        with in_use(state, card.dataset_id):
            charge = open_alone(state, card, work, permission, noise)
        share = {"record": charge.record, "used": charge.used, "run": str(charge.run)}
        return charge
    finally:
        distributed.broadcast_object(share)


def open_share(state: Path, card: Card, work: ChargeRequest, share: dict | None) -> WorkerCharge:
    """Return this process's part of the first process's charge.

    share: description of the charge from the first process, or None if it opened no charge. Raises
    RefusedElsewhereError if there is no charge, and BudgetError if the journal that this process
    reads does not contain the charge.
    """
    if share is None:
        raise RefusedElsewhereError(
            f"{work.stage}: the first process opened no charge: see its message"
        )
    record = share["record"]
    odometer = Odometer(state, card.dataset_id)
    if record["id"] not in odometer.known():
        raise BudgetError(
            f"{work.stage}: {odometer.path} lacks the charge {record['id'][:8]} that the first "
            "process opened: all processes must use the same state directory, on a shared file "
            "system"
        )
    return WorkerCharge(
        record, images_of(state, card, work), run=Path(share["run"]), used=share["used"]
    )


def images_of(state: Path, card: Card, work: ChargeRequest) -> ImageSet | LatentSet:
    """Return the images or latents that the charge draws.

    Raises BudgetError if they were not prepared for the unit that the charge protects.
    """
    if (
        card.unit != work.unit
        or work.unit not in UNITS
        or not (work.group_cap == 1 or work.unit == GROUP)
    ):
        raise BudgetError(
            f"{work.stage}: the plan is for the unit {work.unit} (privacy.unit), but dataset "
            f"{card.dataset_id!r} was prepared for the unit {card.unit} (data.groups): make the "
            "two settings agree, and run `stage prepare sensitive` and `stage plan`"
        )
    return (
        load_latents(state, card, work.latents)
        if work.latents
        else load_prepared(state, card, SENSITIVE)
    )


def open_alone(
    state: Path,
    card: Card,
    work: ChargeRequest,
    permission: SpendingPolicy,
    noise: NoiseSource | None = None,
) -> Charge:
    """Open a charge for `work` on the images of `card`, or refuse it.

    The whole charge is journalled before it is returned. Work that was already released on the same
    images is refused.

    If a killed process left a charge for the same work open, that charge is resumed with fresh
    noise and at no further cost. It continues after the last use with a result on disk. Resuming is
    safe, because a release leaves the run's private directory only after its charge is closed, so
    an open charge has published nothing. The resumed charge gets a new record id. A charge that is
    resumed from two copies of a state directory therefore has two records.

    If an open charge has the same plan but different inputs, the work is refused. Without this
    rule, two clones of a project could both pay for a query if their free stages gave different
    results.

    noise: only for tests.

    Raises BudgetError if the work was already released, an open charge of the same plan cannot be
    resumed, the lifetime budget would be exceeded, another process uses the run, or the journal is
    invalid or lacks entries of `work.seen`; DataError if there are no images, if another process
    replaces them, or if they differ from the images of an open charge.
    """
    noise = noise or NoiseSource()
    prepared = kept_fingerprint(state, card)
    images = images_of(state, card, work)
    if kept_fingerprint(state, card) != prepared:
        raise DataError(
            f"{work.stage}: another process has just replaced the prepared images. Nothing was "
            "charged. Run the stage again"
        )
    odometer = Odometer(state, card.dataset_id)
    with odometer.locked(), ExitStack() as stack:
        check_known(odometer, card, work.seen, permission.lifetime_epsilon != UNLIMITED)
        runs = odometer.charges(card.version)
        record = new_record(card, work, permission, noise.label)
        # The terms that must not change if a run resumes.
        terms = {
            key: record.get(key)
            for key in ("event", "max_norm", "adjacency", "unit", "group_weight")
        }
        decision = decide(state, work, runs, prepared, terms, noise.label)
        refuse_released(decision, work, prepared)
        if (left_open := decision.run) is None:
            check_lifetime(odometer, {work.stage: work.mechanism}, permission, work.unit)
        run = state / "runs" / (left_open.id if left_open else record["id"])
        for folder in (run.parent, run):
            make_folder(folder, 0o700)
        message = (
            f"{work.stage}: run {run.name} is locked by another process: wait until that process "
            "ends, or stop it"
        )
        with explained(BudgetError, lambda _: message, causes=(Timeout,)):
            stack.enter_context(holding(file_lock(run / "lock", blocking=False)))
        if left_open is None:
            odometer.append(OPEN, plan=work.plan, work=work.digest, images=prepared, record=record)
        elif decision.problem:
            # Logs show the text of a BudgetError, but not the text of a DataError. If the images
            # have changed, the text reveals this change, so a DataError is raised.
            withheld = left_open.drew_others(prepared)
            raise (DataError if withheld else BudgetError)(decision.problem)
        else:
            refuse_kept(odometer, run / RELEASED, left_open, work)
            # The owner may have added or withdrawn the claim about persons since the charge was
            # opened
            old_record = {key: value for key, value in left_open.record.items() if key != "claim"}
            record = old_record | {key: record[key] for key in ("id", "claim") if key in record}
            odometer.append(RESUME, id=run.name, adopts=left_open.record["id"], record=record)
        lock = stack.pop_all()
    used, checkpoint = (left_open.uses, left_open.checkpoint) if left_open else (0, None)
    kind = SharedCharge if distributed.world_size() > 1 else Charge
    return kind(
        record,
        images,
        odometer=odometer,
        noise=noise,
        run=run,
        lock=lock,
        used=used,
        checkpoint=checkpoint,
        group_cap=work.group_cap,
    )


def refuse_released(decision: Decision, work: ChargeRequest, prepared: str) -> None:
    """Raise AlreadyReleasedError if the work was released. prepared: fingerprint of the images."""
    run = decision.run
    if run is None or run.end != CLOSE:
        return
    warning = (
        "The images have changed since this release. If an image was withdrawn, make a new "
        f"release: set a new data.version, or set {work.pay}"
    )
    note = warning if run.drew_others(prepared) else ""
    raise AlreadyReleasedError(run, work, run.released, decision.problem, note)


def refuse_kept(odometer: Odometer, release_folder: Path, run: Run, work: ChargeRequest) -> None:
    """Journal the run's release and raise AlreadyReleasedError, if the release is complete.

    An open run has a complete release if a process was killed before it journalled the release. If
    there is no complete release, this function does nothing.

    release_folder: private copy of the release.
    """
    if release_folder.exists():
        digest = read_kept(release_folder, work.stage, None, work.pay)
        odometer.append(CLOSE, id=run.id, uses=work.mechanism.uses, released=digest)
        raise AlreadyReleasedError(run, work, digest)


def open_local(
    state: Path, card: Card, purpose: str, *, everywhere: bool = False
) -> tuple[ImageSet, ImageSet]:
    """Open the sensitive and the hold-out images for work outside the guarantee.

    The results of that work must be local. From this call until the process ends, `stage forget`
    refuses to run, because the process may still write results.

    everywhere: True if all processes call this function, to open the images in each of them. The
    first process journals the local work before the function returns in any process.
    """
    # Called before any image is read. Until this call returns, `stage forget` may delete the images
    use_until_the_end(state, card.dataset_id)
    sensitive = load_prepared(state, card, SENSITIVE)
    holdout = load_prepared(state, card, "holdout")
    if not everywhere or distributed.is_main():
        Odometer(state, card.dataset_id).append(LOCAL_USE, purpose=purpose)
    if everywhere:
        distributed.broadcast_object(None)
    return sensitive, holdout


def ensure_latents(
    state: Path,
    card: Card,
    encoder: str,
    purpose: str,
    load: Callable[[], Encode],
    progress: Callable[[], AbstractContextManager[Callable[[int, int], None]]],
) -> str:
    """Return the key of the images' latents; if there are no latents yet, encode the images first.

    Encoding is local work: it is journalled, and its results stay private. Progress is
    reported in whole per cent only, because the number of images is private.

    encoder: digest of everything in the encoder that affects a latent;
    purpose: purpose of the encoding, for the journal;
    load: function that loads the encoder;
    progress: function that opens a display of the progress.
    """
    key = latents_key(card, encoder)
    if distributed.is_main() and not have_latents(state, card, key):
        encode = load()
        open_local(state, card, purpose)
        with progress() as report:
            write_latents(state, card, key, encode, report)
    return distributed.broadcast_object(key)  # the other processes wait until the latents exist


def new_record(
    card: Card, work: ChargeRequest, permission: SpendingPolicy, noise_source: str
) -> dict:
    packages = ("sfumato", "torch", "numpy", "dp-accounting", "randomgen")
    record = {
        "id": secrets.token_hex(16),
        "stage": work.stage,
        "dataset_id": card.dataset_id,
        "data_version": card.version,
        "unit": UNITS[work.unit],
        "adjacency": permission.adjacency,
        "event": work.mechanism.to_json(),
        "released": work.released,
        "sensitivity": work.sensitivity,
        "noise_source": noise_source,
        "max_norm": float(work.max_norm),
        "plan": work.plan,
        "settings": work.settings,
        "revision": work.revision,
        "again": work.again,
        "versions": {name: installed_version(name) for name in packages},
        "time": int(time.time()) // DAY * DAY,
    }
    if work.unit == GROUP:
        record["sensitivity"] = (
            work.sensitivity
            + "; of a group the mean over its images, which is no longer than that of one"
        )
        record["group_weight"] = (
            "mean" if work.group_cap == 1 else f"capped at {work.group_cap} images"
        )
    if work.unit == IMAGE and permission.one_image_each:
        record["claim"] = "no two images are of one person, says the owner"
    return record


def installed_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
