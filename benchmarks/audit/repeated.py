"""The repeated audit: many releases on two neighbouring sets, and one test fixed beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audit.bounds import gaussian_bounds
from audit.subjects import Subject, made_images, noise_of
from sfumato.data.prepare import prepare_sensitive
from sfumato.data.store import latents_key, read_card, write_latents
from sfumato.privacy.authorize import ChargeRequest, open_charge
from sfumato.privacy.charge import Charge
from sfumato.privacy.events import Mechanism
from sfumato.privacy.noise import public_grid
from sfumato.privacy.policy import SpendingPolicy
from sfumato.settings.data import Data


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of a repeated audit.

    planted: whether the subject has a planted bug;
    mu: claimed μ;
    low, high: measured bounds on μ;
    low_bits: lower bound on μ by another test. Released values are multiples of the spacing of the
        public grid. This test uses only whether one value of each release is an odd or an even
        multiple;
    off_grid: number of releases with a value that is not a multiple of this spacing;
    runs: number of releases with the target, which equals the number without it;
    alarm: whether the audit refutes the claim.
    """

    name: str
    planted: bool
    mu: float
    low: float
    high: float
    low_bits: float
    off_grid: int
    runs: int

    @property
    def alarm(self) -> bool:
        return self.low > self.mu or self.low_bits > self.mu or self.off_grid > 0


class Watched:
    """A charge that also passes every release to `look`."""

    def __init__(self, charge: Any, look: Callable[[Tensor], None]) -> None:
        self.charge, self.look = charge, look

    def __getattr__(self, name: str) -> Any:
        return getattr(self.charge, name)

    def sum(self, rows_of: Any, max_norm: float, **how: Any) -> Tensor:
        released: Tensor = self.charge.sum(rows_of, max_norm, **how)
        self.look(released)
        return released

    def release(self, total: Tensor, max_norm: float, *, integer: bool = False) -> Tensor:
        released: Tensor = self.charge.release(total, max_norm, integer=integer)
        self.look(released)
        return released


class Bare:
    """A charge that draws all images and releases sums without noise.

    An observer who knows all images can compute these sums.
    """

    sample_rate, noise_multiplier, uses = 1.0, 0.0, 1
    sum = Charge.sum
    agree = Charge.agree
    check_alike = Charge.check_alike

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels
        self.released: list[tuple[Tensor, bool]] = []

    def batches(
        self, size: int, draws: int | None = None, *, labels_only: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.images, self.labels

    def probe(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, *self.images.shape[1:]), torch.tensor([-1])

    def release(self, total: Tensor, max_norm: float, *, integer: bool = False) -> Tensor:
        self.released.append((total.double(), integer))
        return total


@contextmanager
def opened(
    images: Tensor, labels: Tensor, subject: Subject, mechanism: Mechanism
) -> Iterator[Charge]:
    """Open a charge on generated images, in a temporary state directory."""
    with TemporaryDirectory(prefix="audit-") as folder:
        state, card, source = (
            Path(folder) / "state",
            Path(folder) / "card.json",
            Path(folder) / "made.npz",
        )
        pixels = (images[:, 0] * 255).round().byte().numpy()
        classes = np.array([f"made {i}" for i in range(max(2, int(labels.max()) + 1))])
        np.savez(source, images=pixels, labels=labels.numpy(), classes=classes)
        data = Data(dataset_id="made", source="npz", path=str(source), holdout_fraction=0.0)
        with redirect_stderr(StringIO()):  # hides the progress of the preparation
            prepare_sensitive(data, state, card, Path(folder) / "raw")
        public, key = read_card(card), None
        if subject.encode is not None:
            key = latents_key(public, subject.name)
            write_latents(state, public, key, subject.encode)
        work = ChargeRequest(
            stage="count",
            plan=subject.name,
            settings=subject.name,
            mechanism=mechanism,
            max_norm=subject.max_norm,
            released="an audit of made images",
            sensitivity="as claimed",
            latents=key,
        )
        permission = SpendingPolicy(delta=1e-5, lifetime_epsilon="unlimited")
        yield open_charge(
            state, public, work, permission, subject.noise() if subject.noise else None
        )


def stored(images: Tensor) -> Tensor:
    """Round images to 8 bits, as they are stored on disk."""
    return (images * 255).round() / 255


def audit(
    subject: Subject,
    runs: int = 10_000,
    mu: float = 2.0,
    confidence: float = 0.999,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verdict:
    """Measure how well an observer can distinguish releases with and without one image.

    There are `runs` releases with this image, the target, and as many without it. The test judges a
    release to contain the target if it lies nearer to the sum with the target than to the sum
    without it. The observer knows everything but the noise, which is the worst case that the
    guarantee covers.
    """
    images, labels = made_images()
    seen = subject.encode(stored(images)).half().float() if subject.encode else stored(images)
    totals = []
    for count in (len(images), len(images) - 1):
        bare = Bare(seen[:count], labels[:count])
        subject.spend(bare)
        totals.append(bare.released[0])
    (whole_set, integer), (rest, _) = totals
    direction = whole_set - rest
    length = float(direction.norm())
    entry = int(direction.abs().argmax())
    std = noise_of(mu) * subject.max_norm
    grid = 1.0 if integer else public_grid(std)
    said, odd, off_grid = [0, 0], [0, 0], 0
    mechanism = Mechanism(noise_multiplier=noise_of(mu), uses=runs)
    for without, count in enumerate((len(images), len(images) - 1)):

        def look(released: Tensor, without: int = without) -> None:
            nonlocal off_grid
            found = released.double()
            said[without] += float(((found - rest) * direction).sum()) > length**2 / 2
            steps = found / grid
            off_grid += not torch.equal(steps, steps.round())
            odd[without] += float(steps.flatten()[entry]) % 2 == 1

        with opened(images[:count], labels[:count], subject, mechanism) as charge:
            watched = Watched(charge, look)
            for run in range(runs):
                subject.spend(watched)
                if run % 100 == 99:
                    progress(without * runs + run + 1, 2 * runs)
    low, high = gaussian_bounds(said[0], said[1], runs, confidence)
    bits = max(
        gaussian_bounds(a, b, runs, (1 + confidence) / 2)[0]
        for a, b in (odd, (runs - odd[0], runs - odd[1]))
    )
    return Verdict(
        name=subject.name,
        planted=subject.planted,
        mu=mu,
        low=low,
        high=high,
        low_bits=max(0.0, bits),
        off_grid=off_grid,
        runs=runs,
    )
