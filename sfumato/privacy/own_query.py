"""Charge a query of one's own: `sfumato.open_charge`, for researchers and notebooks."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from sfumato.data.cards import read_card
from sfumato.errors import ConfigError, DataError
from sfumato.privacy import authorize
from sfumato.privacy.accountant import checked_delta
from sfumato.privacy.charge import Charge, check_norm
from sfumato.privacy.events import Mechanism
from sfumato.privacy.rows import Rows, form_of
from sfumato.settings.stages import STAGES

FAILED = (
    "rows failed on drawn images: this use is spent, it releases nothing, and the next one may go on. The reason is "
    "not shown, for it may tell who is in the set: look for it with public images"
)


class OwnCharge:
    """A charge for a query of one's own: `uses` noisy sums, each over a draw of its own."""

    def __init__(self, charge: Charge) -> None:
        self._charge = charge

    @property
    def record(self) -> dict:
        """Record of this charge in the odometer; public."""
        return self._charge.record

    def sum(self, rows: Callable[[Tensor, Tensor], Tensor], max_norm: float | None = None, *, size: int = 1) -> Tensor:
        """Release the noisy sum of the rows of all drawn images: one use.

        Args:
            rows: Function from (B, C, H, W) float32 in [0, 1] and (B,) int64 to (B, K), one row per
                image, each a function of that image only. It keeps nothing, draws no random numbers
                and prints nothing. First calls get public noise.
            max_norm: Bound of the charge, by default. Longer rows are scaled to it; rows that are
                not finite, and batches whose rows are not (B, K), are left out.
            size: Largest B. With 1, no image can change another's row unless the function remembers
                it. A larger batch is faster, but the function itself must then keep rows
                independent (batch normalisation does not).

        Returns:
            (K,) float64.

        Raises:
            ConfigError: The function fails on public noise, does not give one row per image, or
                gives an image another row the second time. No use is lost.
            DataError: The function fails on a drawn image. That use is spent and releases nothing;
                the next one may start.
            BudgetError: All uses are spent, `max_norm` is another one, or the `with` block has
                ended.

        Guarantee:
            One image more or less moves the sum by at most `max_norm` before the noise, if rows
            follow from their own images only.
        """
        charge = self._charge
        name = charge.record["stage"]
        bound = charge.record["max_norm"] if max_norm is None else max_norm
        charge.check_norm(bound)
        if type(size) is not int or size < 1:
            raise ConfigError(f"{name}: size={size!r} is not a number of images: give a whole number from 1 on")

        def guarded(images: Tensor, labels: Tensor) -> Rows:
            try:
                return Rows(rows(images, labels))
            except Exception as error:
                if charge.drawing:
                    raise DataError(f"{name}: {FAILED}") from None
                raise ConfigError(f"{name}: rows fails on public noise, no use is lost ({error!r}): mend it") from error

        check_repeats(name, guarded, *charge.probe())
        try:
            return charge.sum(guarded, bound, size=size)
        finally:
            charge.end_use()


def check_repeats(name: str, rows: Callable[[Tensor, Tensor], Rows], images: Tensor, labels: Tensor) -> None:
    """Raise ConfigError if an image of public noise gets another row the second time."""
    first, second = (rows(images[:1], labels[:1]) for _ in range(2))
    alike = form_of(first, 1) == form_of(second, 1)
    if not alike or not torch.allclose(first.left.double(), second.left.double(), rtol=1e-3, equal_nan=True):
        raise ConfigError(
            f"{name}: rows gave one image of public noise two different rows, no use is lost. It remembers earlier "
            "images or draws random numbers, so one image could change the rows of others, which the noise does not "
            "cover: let each row follow from its own image only"
        )


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
    """Charge the odometer for `uses` Gaussian sums over the sensitive images, and yield the charge.

    Every call is a new charge, journalled completely before the first image is drawn, and stays
    spent even if it is not used. If its numbers follow from earlier releases, `docs/concepts.md`
    describes what is proven of the lifetime.

    Args:
        state: Private state directory.
        card: Card of the prepared images, `data/sensitive/card.json`.
        name: Name of the query in the odometer; not a stage's name.
        sigma: Noise multiplier: the noise has the standard deviation sigma · max_norm.
        size_hint: Public, rounded number of units, which gives the default of `delta`.
        lifetime_epsilon: Limit for all charges on the dataset, including this one; or "unlimited".
        uses: Number of sums.
        sample_rate: Probability of each unit to enter a draw.
        max_norm: L2 bound of a row.
        delta: δ at which the lifetime is composed.

    Raises:
        BudgetError: The lifetime budget would be exceeded, or a number gives no guarantee.
        ConfigError: The name is a stage's, or the size or δ is beyond the limits of a plan.

    Guarantee:
        The charge covers sums of rows that each follow from one image only. A function that
        remembers breaks it, such as one that keeps earlier images, a running mean or a count of its
        calls, skips images that it has seen, or draws from a random generator. Then one image
        changes the rows of others, and no noise covers this. `sum` refuses a function that gives an
        image of public noise another row the second time; it finds no other memory.
    """
    if not isinstance(name, str) or name in STAGES or not name.isidentifier() or len(name) > 64:
        raise ConfigError(f"name={name!r}: give a word that is not the name of a stage, such as 'edges'")
    policy = authorize.SpendingPolicy(delta=checked_delta(delta, size_hint), lifetime_epsilon=lifetime_epsilon)
    check_norm(name, max_norm)
    public = read_card(Path(card))
    once = secrets.token_hex(16)  # makes each call different work
    work = authorize.ChargeRequest(
        stage=name,
        plan=once,
        settings=once,
        mechanism=Mechanism(noise_multiplier=sigma, sample_rate=sample_rate, uses=uses),
        max_norm=max_norm,
        released="sums of a query of one's own",
        sensitivity=f"{max_norm:g}: rows are scaled to this norm",
        unit=public.unit,
    )
    with closing(authorize.open_charge(Path(state), public, work, policy)) as charge:
        yield OwnCharge(charge)
