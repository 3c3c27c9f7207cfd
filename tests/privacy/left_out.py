"""What `test_left_out.py` has several processes do: `left_out.py OUT`, under torchrun or alone.

The first process saves every sum that a query releases of a set, and of that set without one of its images or groups.
Noise is so small that the sums show through. Draws of DP-SGD are tied to the image, whichever process sees it.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from test_groups import (
    CLASSES,
    COSINES,
    FEATURES,
    HIDDEN,
    SIZES,
    THIRTY,
    C,
    made_model,
    made_patients,
    opened,
    part,
    picks_in_order,
    seeded_draws,
)
from torch import Tensor

from sfumato.baselines.private_evolution import query_votes
from sfumato.data.images import ImageSet
from sfumato.data.store import LatentSet
from sfumato.dpsgd.run import State, gradient_sum
from sfumato.privacy import charge as door
from sfumato.privacy.charge import Charge, Share
from sfumato.privacy.events import Mechanism
from sfumato.queries.central import query_central
from sfumato.queries.count import query_count
from sfumato.queries.joint import query_joint_embedding
from sfumato.runtime import distributed
from sfumato.settings.dpsgd import Finetune
from sfumato.settings.queries import Central

BOUNDS = {
    "count": 1.0,
    "central": 2.0,
    "frequency": 1.0,
    "covariance": 1.0,
    "votes": 1.0,
    "gradients-1": C,
    "gradients-8": C,
}
SINGLES = (0, 100, 201)  # images that are left out where images are the unit


def charge_on(images: ImageSet | LatentSet, max_norm: float) -> Charge:
    """This process's charge on images in memory, or its share of the first one's."""
    if distributed.is_main():
        return opened(images, max_norm)
    mechanism = Mechanism(noise_multiplier=HIDDEN, sample_rate=1.0, uses=1)
    return Share({"stage": "count", "max_norm": max_norm}, images, mechanism, run=Path(), used=0)


def gradients(images: ImageSet, draws: int) -> Tensor:
    model = made_model()
    state = State(model, Finetune(draws=draws, max_grad_norm=C, microbatch_size=4), public_batch=16.0, autocast=False)
    state.draw = lambda drawn: seeded_draws(model, drawn, draws)  # type: ignore[method-assign]
    charge = charge_on(images, C)
    return charge.release(gradient_sum(state, charge), C)


def votes(images: ImageSet) -> Tensor:
    rows = LatentSet((images.images.reshape(len(images), -1) / 255).astype(np.float16), images.labels, images.groups)
    candidates = torch.rand(40, rows.latents.shape[1], generator=torch.Generator().manual_seed(0))
    return query_votes(charge_on(rows, 1.0), candidates, torch.arange(40) % 10, 10)


def mean(images: ImageSet) -> Tensor:
    return 30 * query_central(charge_on(images, 2.0), THIRTY, (1, 8, 8), Central(repeats=1, max_norm=2.0)).double()


SUMS: dict[str, Callable[[ImageSet], Tensor]] = {
    "count": lambda images: query_count(charge_on(images, 1.0), 10),
    "central": mean,
    "frequency": lambda images: query_joint_embedding(charge_on(images, 1.0), FEATURES, 10, 1.0),
    "covariance": lambda images: query_joint_embedding(charge_on(images, 1.0), COSINES, 10, 1.0),
    "votes": votes,
    "gradients-1": partial(gradients, draws=1),
    "gradients-8": partial(gradients, draws=8),
}


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
    few = part(everyone, everyone.groups < 9)
    found = {f"{name}, {who}": query(some).double() for who, some in neighbours(few) for name, query in SUMS.items()}
    if distributed.is_main():
        torch.save(found, out)
    distributed.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
