"""What `test_left_out.py` has several processes do: `left_out.py OUT`, under torchrun or alone.

The first process saves every sum that a query releases of a set, and of that set without one of its images or groups.
Noise is so small that the sums show through. Draws of DP-SGD are tied to the image, whichever process sees it.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from cases import CASES
from sklearn.datasets import load_digits
from test_groups import CLASSES, HIDDEN, SIZES, drawn_by, made_patients, opened, part, picks_in_order

from sfumato.data.images import ImageSet
from sfumato.data.store import LatentSet
from sfumato.privacy import charge as door
from sfumato.privacy.charge import Charge, WorkerCharge
from sfumato.privacy.events import Mechanism
from sfumato.runtime import distributed

SINGLES = (0, 100, 201)  # images that are left out if images are the unit


def charge_on(images: ImageSet | LatentSet, max_norm: float, uses: int) -> Charge:
    """This process's charge on images in memory, or a worker's part of the first one's."""
    if distributed.is_main():
        return opened(images, max_norm, uses=uses)
    mechanism = Mechanism(noise_multiplier=HIDDEN, sample_rate=1.0, uses=uses)
    return WorkerCharge({"stage": "count", "max_norm": max_norm}, images, mechanism, run=Path(), used=0)


def neighbours(everyone: ImageSet) -> Iterator[tuple[str, ImageSet]]:
    """(who is left out, the set): of groups, and of images alone."""
    yield "group whole", everyone
    for group in range(len(SIZES)):
        yield f"group {group}", part(everyone, everyone.groups != group)
    alone = replace(everyone, groups=None)
    yield "image whole", alone
    for image in SINGLES:
        kept = np.arange(len(alone)) != image
        yield f"image {image}", ImageSet(alone.images[kept], alone.labels[kept], CLASSES)


def main(out: Path) -> None:
    distributed.join()
    torch.set_num_threads(1)
    door.group_picks = picks_in_order
    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    everyone = made_patients(ImageSet(images, bunch.target.astype(np.int64), CLASSES))
    few, found = part(everyone, everyone.groups < 9), {}
    for name, case in CASES.items():
        for who, some in neighbours(few):
            charge = charge_on(drawn_by(case, some), case.bound, case.uses)
            found[f"{name}, {who}"] = case.first_release(charge)
    if distributed.is_main():
        torch.save(found, out)
    distributed.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
