"""Charge a custom query: `sfumato.open_charge`, for researchers and notebooks."""

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.data.cards import Card, read_card
from sfumato.data.prepare import kept_fingerprint
from sfumato.errors import BudgetError, ConfigError, DataError
from sfumato.privacy import authorize
from sfumato.privacy.accountant import checked_delta
from sfumato.privacy.charge import PROBES, Charge, check_norm
from sfumato.privacy.events import Mechanism
from sfumato.privacy.odometer import Odometer
from sfumato.privacy.policy import check_known, check_lifetime
from sfumato.privacy.project_ledger import seen_in_project
from sfumato.privacy.rows import Rows, form_of
from sfumato.settings.data import SEVERAL
from sfumato.settings.privacy import UNLIMITED
from sfumato.settings.stages import STAGES
from sfumato.storage.in_use import in_use

FAILED = (
    "the function `rows` failed on drawn images. This use of the charge is spent, and nothing was "
    "released. Other uses are not lost. The reason is not shown, because it could identify people "
    "in the set: reproduce the failure with public images"
)


class OwnCharge:
    """A charge for a custom query: `uses` noisy sums, each over a new draw.

    The whole charge is written to the journal at the first `sum`, after the function of this `sum`
    was tried without error on images of random pixels.
    """

    def __init__(
        self,
        state: Path,
        card: Card,
        work: authorize.ChargeRequest,
        policy: authorize.SpendingPolicy,
    ) -> None:
        self._request = state, card, work, policy
        self._charge: Charge | None = None
        self._ended = False
        self._process = os.getpid()
        self._running = threading.Lock()  # held while a sum runs

    @property
    def record(self) -> dict:
        """Record of this charge in the journal. It may be published. There is no record before the
        first `sum`.
        """
        if self._charge is None:
            raise BudgetError("the charge has no record yet: call `sum` first")
        return self._charge.record

    def __reduce__(self):  # also called by `copy`
        raise TypeError("a charge cannot be saved, copied or sent: open another charge")

    def close(self) -> None:
        """End the charge. The `with` block does this at its end."""
        self._ended = True
        if self._charge is not None:
            self._charge.close()

    def sum(
        self,
        rows: Callable[[Tensor, Tensor], Tensor],
        max_norm: float | None = None,
        *,
        size: int = 1,
    ) -> Tensor:
        """Release the noisy sum of the rows of all images in a new draw. Spends one use.

        Args:
            rows: Function from images, (B, C, H, W) float32 in [0, 1], and labels, (B,) int64, to
                one row per image, (B, K). If images have several labels, labels are (B, classes)
                of 0 and 1. A row must depend on its own image only. The function must not store
                anything, draw random numbers or print. Its first calls are trials on images of
                random pixels.
            max_norm: L2 bound of a row. It must equal the charge's bound, which is the default.
                Longer rows are scaled down to it. Non-finite rows, and batches whose rows are not
                (B, K), are left out.
            size: Maximum B. With 1, an image can change another image's row only if the function
                remembers earlier images. A larger batch is faster, but the function itself must
                then keep rows independent (batch normalisation makes them dependent).

        Returns:
            (K,) float64.

        Raises:
            ConfigError: In a trial, the function fails, does not return one row per image, or
                returns a different row if it is called again. Nothing is charged for the first
                `sum`, and no use is lost until the `with` block ends.
            DataError: The function fails on a drawn image. This use is spent, and nothing is
                released. Other uses are not lost.
            BudgetError: All uses are spent, `max_norm` differs from the charge's, the `with` block
                has ended, the lifetime budget was spent since the block began, or another `sum` of
                this charge is still running. In the last case, no use is lost.

        Guarantee:
            If each row depends on its own image only, adding or removing one image changes the sum
            by at most `max_norm` in L2, before noise.
        """
        if not self._running.acquire(blocking=False):
            raise BudgetError(
                f"{self._request[2].stage}: another `sum` of this charge is still running, in "
                "another thread or in the function `rows`: call one `sum` after the other. No use "
                "of the charge is lost"
            )
        try:
            return self._sum(rows, max_norm, size)
        finally:
            self._running.release()

    def _sum(
        self, rows: Callable[[Tensor, Tensor], Tensor], max_norm: float | None, size: int
    ) -> Tensor:
        """Check the arguments, try the function, open the charge if it is not open, and sum."""
        _, card, work, _ = self._request
        name = work.stage
        if self._ended or os.getpid() != self._process:
            raise BudgetError(
                f"{name}: a charge is closed when its `with` block ends, and belongs to one "
                "process: open a new charge"
            )
        bound = work.max_norm
        if max_norm is not None:
            bound = unboxed(max_norm)
        check_norm(name, bound, work.max_norm)
        size = unboxed(size)
        if type(size) is not int or size < 1:
            raise ConfigError(
                f"{name}: size={size!r} is not a number of images: give a whole number, at least 1"
            )

        def guarded(images: Tensor, labels: Tensor) -> Rows:
            try:
                return Rows(rows(images, labels))
            except Exception as error:
                if self._charge is not None and self._charge.drawing:
                    raise DataError(f"{name}: {FAILED}") from None
                raise ConfigError(
                    f"{name}: the function `rows` fails in the trial on random pixels ({error!r}): "
                    "fix it. No use of the charge is lost until the `with` block ends"
                ) from error

        check_repeats(name, guarded, *trial_images(card))
        if self._charge is None:
            self._charge = authorize.open_charge(*self._request)
        charge = self._charge
        try:
            return charge.sum(guarded, bound, size=size)
        finally:
            charge.end_use()


def check_repeats(
    name: str, rows: Callable[[Tensor, Tensor], Rows], images: Tensor, labels: Tensor
) -> None:
    """Raise ConfigError if two calls return different rows for one image of random pixels, or if a
    batch of several images gives rows of another shape or type than a batch of one.
    """
    trials = []
    for count in (1, 1, len(labels)):
        # Clones, because a call may change its arguments, or a buffer that the last call returned
        trial = rows(images[:count].clone(), labels[:count].clone())
        trials.append((form_of(trial, count), trial.left.double().clone()))
    (first_form, first), (second_form, second), (batch_form, _) = trials
    if first_form != second_form or not torch.allclose(first, second, rtol=1e-3, equal_nan=True):
        raise ConfigError(
            f"{name}: in the trial on random pixels, the function `rows` returned two different "
            "rows for one image. The function remembers earlier images or draws random numbers. "
            "One image could then change the rows of other images, and the noise does not hide "
            "this change: compute each row from its own image only. No use of the charge is lost "
            "until the `with` block ends"
        )
    if first_form != batch_form:
        raise ConfigError(
            f"{name}: the shape or type of a row changes with the number of images in the batch: "
            "return rows of one shape and type. No use of the charge is lost until the `with` "
            "block ends"
        )


def trial_images(card: Card) -> tuple[Tensor, Tensor]:
    """Return public images of random pixels in the shape of the dataset's images, and labels."""
    labels = torch.arange(PROBES) % len(card.classes)
    if card.labels == SEVERAL:
        labels = torch.ones(PROBES, len(card.classes), dtype=torch.uint8)
    return torch.rand(PROBES, *card.shape, generator=torch.Generator().manual_seed(0)), labels


def unboxed(value: Any) -> Any:
    """Convert a NumPy scalar to a Python scalar, and return any other value unchanged."""
    if isinstance(value, np.generic):
        return value.item()
    return value


@contextmanager
def open_charge(
    state: str | Path,
    card: str | Path,
    *,
    name: str,
    sigma: float,
    size_hint: int,
    lifetime_epsilon: float | str,
    uses: int = 1,
    sample_rate: float = 1.0,
    max_norm: float = 1.0,
    delta: float | None = None,
) -> Iterator[OwnCharge]:
    """Open a charge for `uses` Gaussian sums over the sensitive images, and yield the charge.

    Every block opens a new charge. Each `sum` first tries its function on images of random pixels.
    The first `sum` that passes this trial writes the whole charge to the journal, before an image
    is drawn. The charge then stays spent, and uses that remain at
    the end of the block are lost. A block without such a `sum` costs nothing.

    If earlier releases influence your choice of sigma, uses or sample_rate, see `docs/concepts.md`
    for what is proven about the lifetime budget.

    Args:
        state: Private state directory.
        card: Card of the prepared images, `data/sensitive/card.json`.
        name: Name of the query in the journal. The names of stages are reserved.
        sigma: Noise multiplier: the noise has the standard deviation sigma · max_norm.
        size_hint: Public, rounded number of units, from which the default of `delta` is computed.
        lifetime_epsilon: Limit of ε for all charges on the dataset, including this one, or
            "unlimited".
        uses: Number of sums.
        sample_rate: Probability that a unit enters a draw.
        max_norm: L2 bound of a row.
        delta: δ at which the lifetime's ε is computed.

    Raises:
        BudgetError: `sigma`, `sample_rate`, `uses` or `max_norm` is out of range, the lifetime
            budget would be exceeded, or the journal lacks a charge that the card's project
            contains.
        ConfigError: The name is reserved, or the size or δ is outside the limits of a plan.

    Guarantee:
        The charge covers sums of rows if each row depends on one image only. A function with memory
        breaks this condition. Examples are a function that stores earlier images, a running mean or
        a count of its calls, and one that skips images it has seen before. A function that draws
        random numbers breaks it too, because the generator's state depends on earlier calls. One
        image then changes the rows of others, and the noise does not hide this change. `sum`
        refuses a function that returns two different rows for one image of random pixels, but
        cannot detect any other memory.
    """
    if not isinstance(name, str) or name in STAGES or not name.isidentifier() or len(name) > 64:
        raise ConfigError(
            f"name={name!r}: give a name of at most 64 letters, digits and underscores, such as "
            "'edges'. It must not start with a digit or be the name of a stage"
        )
    state = Path(state).expanduser().absolute()  # the block may change the current folder
    card = Path(card).expanduser().absolute()
    policy = authorize.SpendingPolicy(
        delta=checked_delta(unboxed(delta), unboxed(size_hint)),
        lifetime_epsilon=unboxed(lifetime_epsilon),
    )
    max_norm = unboxed(max_norm)
    check_norm(name, max_norm)
    public = read_card(card)
    once = secrets.token_hex(16)  # each call counts as different work
    work = authorize.ChargeRequest(
        stage=name,
        plan=once,
        settings=once,
        mechanism=Mechanism(
            noise_multiplier=unboxed(sigma), sample_rate=unboxed(sample_rate), uses=unboxed(uses)
        ),
        max_norm=max_norm,
        released="sums of a query of one's own",
        sensitivity=f"{max_norm:g}: rows are scaled to this norm",
        # In a project, the path of the card is `data/sensitive/card.json`
        seen=seen_in_project(public.dataset_id, card.parent.parent.parent, state),
        unit=public.unit,
    )
    # `sum` checks all of this again when it journals the charge
    with in_use(state, public.dataset_id):
        kept_fingerprint(state, public)
        odometer = Odometer(state, public.dataset_id)
        check_known(odometer, public, work.seen, policy.lifetime_epsilon != UNLIMITED)
        check_lifetime(odometer, {name: work.mechanism}, policy, work.unit)
    with closing(OwnCharge(state, public, work, policy)) as charge:
        yield charge
