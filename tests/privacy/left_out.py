"""Program that `test_left_out.py` runs in several processes.

For every query, the first process saves the sums that are released for a set, and for the set
without one of its images or groups. The processes differ: all but the first get each image
mirrored, paler and with another class, so that their rows differ. The noise is so small that a
release shows its sum. DP-SGD's draws for an image, and the process to which its row is assigned,
depend only on the image. The first process also saves whether processes with different rows or
settings refuse to release.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from cases import CASES
from sklearn.datasets import load_digits
from test_groups import (
    CLASSES,
    HIDDEN,
    SIZES,
    drawn_by,
    made_patients,
    opened,
    part,
    picks_in_order,
)

from sfumato.data.images import ImageSet
from sfumato.data.store import LatentSet
from sfumato.dpsgd import run
from sfumato.errors import ConfigError
from sfumato.privacy import charge as door
from sfumato.privacy import processes
from sfumato.privacy.charge import Charge
from sfumato.privacy.events import Mechanism
from sfumato.privacy.processes import SharedCharge, WorkerCharge
from sfumato.privacy.rows import Rows
from sfumato.runtime import distributed
from sfumato.settings.stages import STAGES

SHARED = {name: case for name, case in CASES.items() if STAGES[case.stage].spread}
SINGLES = (0, 100, 201)  # images to leave out if images are the unit


def charge_on(images: ImageSet | LatentSet, max_norm: float, uses: int) -> Charge:
    """Return the first process's charge on images in memory, or a worker's part of it."""
    if distributed.is_main():
        return opened(images, max_norm, uses=uses, kind=SharedCharge)
    mechanism = Mechanism(noise_multiplier=HIDDEN, sample_rate=1.0, uses=uses)
    record = {"stage": "count", "max_norm": max_norm, "event": mechanism.to_json()}
    return WorkerCharge(record, images, run=Path(), used=0)


def neighbours(everyone: ImageSet) -> Iterator[tuple[str, ImageSet, np.ndarray]]:
    """Yield (name of the case, the set, the process of each image).

    The unit is first a group, then a single image. For each unit, the complete set comes first, and
    then sets without one unit.
    """
    places = np.random.default_rng(0).integers(distributed.world_size(), size=len(everyone))
    yield "group whole", everyone, places
    for group in range(len(SIZES)):
        kept = everyone.groups != group
        yield f"group {group}", part(everyone, kept), places[kept]
    alone = replace(everyone, groups=None)
    yield "image whole", alone, places
    for image in SINGLES:
        kept = np.arange(len(alone)) != image
        yield (
            f"image {image}",
            ImageSet(alone.images[kept], alone.labels[kept], CLASSES),
            places[kept],
        )


def seen_otherwise(charge: Charge, *given) -> tuple[torch.Tensor, ...]:
    images, labels, *rest = READ(charge, *given)
    return (0.6 * images.flip(-1) + 0.1, (labels + 1) % len(CLASSES), *rest)


READ = Charge._read
SUM = Charge.sum
DEALT = processes.assign_processes


def other_rows(charge: Charge, rows_of, *given, **more) -> torch.Tensor:
    """Compute a sum whose rows are one hundredth longer."""
    return SUM(
        charge,
        lambda *batch: Rows(1.01 * (rows := rows_of(*batch)).left, rows.right),
        *given,
        **more,
    )


def refused(name: str, everyone: ImageSet) -> bool:
    """Return whether every process refuses to release if the first process has other rows and
    microbatches than the rest.
    """
    case = SHARED[name]
    own = 16 if distributed.is_main() else 8
    charge = charge_on(drawn_by(case, everyone), case.bound, case.uses)
    with (
        suppress(ConfigError),
        patch.object(Charge, "sum", SUM if distributed.is_main() else other_rows),
        patch.object(run, "choose_microbatch", lambda *given: (own, 8)),
    ):
        case.query(charge)
    return bool(distributed.all_min(charge.used == 0))


def main(out: Path) -> None:
    distributed.join()
    torch.set_num_threads(1)
    door.group_picks = picks_in_order
    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    everyone = made_patients(ImageSet(images, bunch.target.astype(np.int64), CLASSES))
    few = part(everyone, everyone.groups < 9)
    found = {}
    if not distributed.is_main():
        Charge._read = seen_otherwise
    for name, case in SHARED.items():
        for who, some, places in neighbours(few):
            processes.assign_processes = lambda generator, chosen, many, places=places: places[
                chosen.reshape(len(chosen), -1)[:, 0]
            ]
            charge = charge_on(drawn_by(case, some), case.bound, case.uses)
            found[f"{name}, {who}"] = case.first_release(charge)
        processes.assign_processes = DEALT
        found[f"{name}, refused"] = refused(name, replace(few, groups=None))
    if distributed.is_main():
        torch.save(found, out)
    distributed.leave_group()
