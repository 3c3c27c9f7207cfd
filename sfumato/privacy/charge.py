"""Draw sensitive images and add noise to their sums, within a paid charge.

A `Charge` is the only object that draws sensitive batches and adds noise.
`sfumato.privacy.authorize` checks the budget and journals the whole charge before it creates a
`Charge`.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sfumato.data.groups import GroupIndex
from sfumato.data.images import ImageSet
from sfumato.data.store import LatentSet
from sfumato.errors import BudgetError, ConfigError
from sfumato.privacy.events import Mechanism
from sfumato.privacy.noise import NoiseSource, public_grid, rounded
from sfumato.privacy.odometer import ABANDON, CLOSE, PROGRESS, Odometer
from sfumato.privacy.rows import Rows, bounded_sum, form_of, in_form
from sfumato.privacy.sampling import group_picks, group_weights, poisson_blocks
from sfumato.settings.fields import is_positive

# Indices of images, and the weight of each image. The weights are None unless all images of the
# drawn groups are read
Drawn = tuple[np.ndarray, np.ndarray | None]
PROBES = 4  # Number of images of random pixels that `Charge.probe` returns
# Both limits are far from the ends of the range in which float32 has full precision
SMALLEST_NORM = 1e-20
LARGEST_NORM = 1e20


def check_norm(stage: str, max_norm: float, charged_norm: float | None = None) -> None:
    """Raise BudgetError if a bound is so small or so large that noise could be lost in rounding, or
    if it differs from the bound of the charge.
    """
    if not is_positive(max_norm) or not SMALLEST_NORM <= max_norm <= LARGEST_NORM:
        raise BudgetError(
            f"{stage}: max_norm={max_norm!r} must be a number from {SMALLEST_NORM:g} to "
            f"{LARGEST_NORM:g}. Outside this range, the noise could be lost in rounding"
        )
    if charged_norm is not None and max_norm != charged_norm:
        raise BudgetError(
            f"{stage}: max_norm={max_norm:g}, but the charge was opened for "
            f"max_norm={charged_norm:g}: use the bound of the charge"
        )


class Charge:
    """A paid mechanism. A use is one draw and one release; uses beyond the paid number are refused.

    If images have groups, groups are sampled instead of images. A group contributes the mean of its
    images' rows (in DP-SGD, the mean over K images sampled from the group). Only
    `sfumato.privacy.authorize.open_charge` creates a charge. A charge is not thread-safe, and
    cannot be copied or used in a forked process.

    group_cap: smallest number of images with which a group has full weight. The weight of a smaller
    group is its number of images divided by `group_cap`. With 1, all groups have full weight.
    """

    def __init__(
        self,
        record: dict,
        images: ImageSet | LatentSet,
        *,
        odometer: Odometer,
        noise: NoiseSource,
        run: Path,
        lock: ExitStack,
        used: int = 0,
        checkpoint: str | None = None,
        group_cap: int = 1,
    ) -> None:
        self.record = record
        self.used = used  # number of completed uses, including those by earlier processes
        self.checkpoint = checkpoint  # sha256 of the state saved after these uses
        self.run = run
        self._mechanism = Mechanism.from_json(record["event"])
        self._images = images
        self._noise = noise
        self._groups = None if images.groups is None else GroupIndex(images.groups)
        self._group_cap = group_cap
        self._odometer = odometer
        self._lock = lock
        self._drawn = False
        self._closed = False
        self._process = os.getpid()

    @property
    def uses(self) -> int:
        return self._mechanism.uses

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier of the mechanism. It is public, like the record."""
        return self._mechanism.noise_multiplier

    @property
    def sample_rate(self) -> float:
        """Sample rate of the draws. It is public, so a query may divide by it."""
        return self._mechanism.sample_rate

    @property
    def drawing(self) -> bool:
        """True if images were drawn for a use that is not completed."""
        return self._drawn

    def batches(
        self, size: int, draws: int | None = None, *, labels_only: bool = False
    ) -> Iterator[tuple[Tensor, ...]]:
        """Draw one Poisson sample with the mechanism's rate, in pieces of at most `size`.

        An empty draw yields nothing and still counts as a draw. Memory use grows with `size`, not
        with the set or the draw, except that groups need an index of all images.

        Args:
            size: Maximum B.
            draws: Number K of images to pick from each drawn group. They are picked at random, with
                replacement, so a group may have any size. The shapes are then
                ((B, K, C, H, W), (B, K)). If images have no groups, `draws` has no effect.
            labels_only: Read no pixels; images are (B, 0).

        Yields:
            ((B, C, H, W) float32, (B,) int64): images in [0, 1] or their latents, and labels. If
            images have several labels, labels are (B, classes) uint8. If images have groups and
            `draws` is None, the pieces contain all images of each drawn group, and a third tensor,
            (B,) float64, contains the weight of each image in its group.

        Raises:
            BudgetError: The charge is closed, all uses are spent, or the last draw was not
                released.
        """
        self._check_owner()
        if self._closed or self.used >= self.uses:
            if self._closed:
                raise BudgetError(
                    f"{self.record['stage']}: the charge is closed: open a new charge for a "
                    "further draw"
                )
            raise BudgetError(
                f"{self.record['stage']}: all uses of the charge are spent (number of uses: "
                f"{self.uses}): open a new charge for a further draw"
            )
        if self._drawn:
            raise BudgetError(
                f"{self.record['stage']}: the last draw was not released: release it before the "
                "next draw"
            )
        self._drawn = True
        return self._pieces(self.used, size, draws, labels_only)

    def _pieces(
        self, use: int, size: int, draws: int | None, labels_only: bool
    ) -> Iterator[tuple[Tensor, ...]]:
        """Read this process's part of the draw for one use, piece by piece.

        No piece can be read after the draw is released.
        """
        for chosen, weights in self._draw(draws):
            for piece in (slice(start, start + size) for start in range(0, len(chosen), size)):
                if not self._drawn or self.used != use:
                    raise BudgetError(
                        f"{self.record['stage']}: this draw has ended, so the rest of it cannot be "
                        "read: read all batches before the release"
                    )
                yield self._read(
                    chosen[piece], None if weights is None else weights[piece], labels_only
                )

    def _draw(self, draws: int | None) -> Iterator[Drawn]:
        """Draw one sample in blocks of image indices, (n,).

        With groups, yields the indices of all images of the drawn groups, and their weights. With
        `draws`, indices are (groups, draws), and a group of n < `group_cap` images is sampled at
        n/`group_cap` times the charged rate.
        """
        generator = self._noise.generator
        groups = self._groups
        if groups is None:
            for chosen in poisson_blocks(
                self._noise.generator, len(self._images), self.sample_rate
            ):
                yield chosen, None
            return
        for chosen in poisson_blocks(generator, len(groups), self.sample_rate):
            if draws is None:
                sizes = groups.sizes[chosen]
                yield (
                    groups.images_of(chosen),
                    np.repeat(group_weights(sizes, self._group_cap), sizes),
                )
                continue
            if self._group_cap > 1:
                chosen = chosen[
                    generator.random(len(chosen)) * self._group_cap < groups.sizes[chosen]
                ]
            picks = group_picks(generator, groups.sizes[chosen], draws)
            yield groups.order[groups.starts[chosen][:, None] + picks], None

    def _read(
        self, chosen: np.ndarray, weights: np.ndarray | None, labels_only: bool
    ) -> tuple[Tensor, ...]:
        indices = chosen.flatten()
        if labels_only:
            labels = torch.from_numpy(np.array(self._images.labels[indices]))
            images = torch.zeros(len(labels), 0)
        else:
            images, labels = self._images.batch(indices)
        shaped = images.unflatten(0, chosen.shape), labels.unflatten(0, chosen.shape)
        return shaped if weights is None else (*shaped, torch.from_numpy(weights))

    def sum(
        self,
        rows_of: Callable[[Tensor, Tensor], Rows],
        max_norm: float,
        *,
        size: int,
        integer: bool = False,
        labels_only: bool = False,
    ) -> Tensor:
        """Release the noisy sum, float64, of the rows of one draw. Spends one use.

        The row of a group is the mean of its images' rows, so queries need not handle groups.
        Before the draw, `rows_of` is tried on public random pixels (see `probe`). A batch whose
        rows differ in shape or type from the rows of this trial is left out of the sum.

        Args:
            rows_of: Function from the images and labels of a batch of at most `size` to one row per
                image. A row must depend on its own image only. Rows with infinite or NaN entries
                are left out, and longer rows are scaled down to the norm `max_norm`.
            max_norm: See `release`.
            size: See `batches`.
            integer: See `release`.
            labels_only: See `batches`.

        Raises:
            ConfigError: In the trial, `rows_of` does not return one row per image, rows change in
                shape or type with the number of images, or processes get different rows. No use is
                lost.
        """
        images, labels = self.probe()
        single_row = rows_of(images[:1], labels[:1])
        trial = rows_of(images, labels)
        form = form_of(trial, len(labels))
        if form_of(single_row, 1) != form:
            raise ConfigError(
                "the shape or type of a row changes with the number of images in the batch: "
                "return rows of one shape and type"
            )
        self.check_alike([part for part in trial if part is not None])
        total = bounded_sum(
            Rows(trial.left[:0], None if trial.right is None else trial.right[:0]), max_norm
        )
        for images, labels, *weights in self.batches(size, labels_only=labels_only):
            count = len(labels)
            rows = in_form(rows_of(images, labels), count, form)
            total = total + bounded_sum(rows, max_norm, *weights).to(total.device)
        return self.release(total.cpu(), max_norm, integer=integer)

    def probe(self) -> tuple[Tensor, Tensor]:
        """Return images of random pixels, and labels for them. They are equal in all processes.

        The pixels are public, because their seed is fixed. The rows of these images show the shape
        of a sum before any sensitive image is drawn.
        """
        images, none = self._images.batch(np.zeros(0, dtype=np.int64))
        if none.ndim == 1:
            labels = torch.arange(PROBES) % len(self._images.classes)
        else:
            labels = none.new_ones(PROBES, *none.shape[1:])
        return (
            torch.rand(PROBES, *images.shape[1:], generator=torch.Generator().manual_seed(0)),
            labels,
        )

    def release(self, total: Tensor, max_norm: float, *, integer: bool = False) -> Tensor:
        """Return `total` + N(0, (noise_multiplier · max_norm)² I), rounded to a public grid.

        This completes the use. The noise is added and the sum is rounded in float64. The result is
        float64 if `total` is float64, otherwise float32.

        Args:
            total: Tensor of any shape: the sum over the units of the draw, or over this process's
                units. Each unit changes it by at most `max_norm` in L2.
            max_norm: Bound of the charge.
            integer: True if `total` counts images. If images have no groups, the result is then
                rounded to whole numbers. All other results are rounded to `public_grid`.

        Guarantee:
            The rounding is post-processing, so the cost equals the cost of the Gaussian. The last
            bits of a float depend on what was summed up, and rounding removes them.
        """
        self._check_owner()
        if self._closed:
            raise BudgetError(
                f"{self.record['stage']}: the charge is closed: nothing more can be released"
            )
        if not self._drawn:
            raise BudgetError(
                f"{self.record['stage']}: nothing was drawn for this release: call batches() first"
            )
        self.check_norm(max_norm)
        self.end_use()
        total = total.detach().to(torch.float64 if total.dtype == torch.float64 else torch.float32)
        return self._noised(total, self._mechanism.noise_multiplier * max_norm, integer)

    def check_norm(self, max_norm: float) -> None:
        """Raise BudgetError unless the charge was opened for this bound."""
        check_norm(self.record["stage"], max_norm, self.record["max_norm"])

    def end_use(self) -> None:
        """Count the use of the current draw as spent, even if its sum was not released.

        No more of the draw can be read. The next use may start. Does nothing if nothing was drawn.
        """
        if self._drawn:
            self._drawn = False
            self.used += 1

    def _noised(self, total: Tensor, std: float, integer: bool) -> Tensor:
        """Add the noise to `total`, and round the result. No other code adds noise."""
        # To save time, the noise is drawn first, while a GPU may still be computing the sum.
        noisy = self._noise.gaussian(tuple(total.shape), std) + total.cpu().double()
        on_integers = integer and self._groups is None
        return rounded(noisy, 1.0 if on_integers else public_grid(std)).to(total)

    def agree(self, tensors: Iterable[Tensor], *plain: object) -> None:
        """Copy `tensors` from the first process to all others, and check that the other values,
        `plain`, are equal in all processes.

        Does nothing in this class, which is for a single process.
        """

    def check_alike(self, rows: Sequence[Tensor]) -> None:
        """Raise ConfigError unless `rows`, the rows of the images of `probe`, are equal in all
        processes, up to rounding.

        Does nothing in this class, which is for a single process.
        """

    def _check_owner(self) -> None:
        """Raise BudgetError in a forked process.

        Without this check, the process and its fork would each count only their own uses.
        """
        if os.getpid() != self._process:
            raise BudgetError(
                f"{self.record['stage']}: the charge was opened by another process: open a new "
                "charge in this process"
            )

    def __reduce__(self):  # also called by `copy`
        raise TypeError(
            "a charge cannot be saved, copied or sent, because each use must be counted: open "
            "another charge"
        )

    def durable(self, checkpoint: str | None = None) -> None:
        """Journal that the state after all uses so far is on disk.

        If this process is killed, the charge is resumed from the newest state in the journal.
        checkpoint: sha256 of the file that contains the state.
        """
        self._journal(PROGRESS, uses=self.used, checkpoint=checkpoint)

    def abandon(self) -> None:
        """Abandon the charge because its durable state is lost.

        The charge stays on the odometer and can never be resumed.
        """
        self._journal(ABANDON)

    def close(self, released: str | None = None) -> None:
        """Journal that this work is released, so that the same work is refused from now on.

        The release must be on disk in `self.run`, the run's private folder, and must not have been
        written anywhere else before this call: an open charge may draw again, which is safe only if
        nothing from its earlier draws was published.

        released: sha256 of the release's `privacy.json`.
        """
        self._journal(CLOSE, uses=self.used, released=released)

    def _journal(self, kind: str, **fields: object) -> None:
        ends = kind != PROGRESS
        self._closed |= ends
        self._odometer.append(kind, id=self.run.name, **fields)
        if ends:
            self._lock.close()
