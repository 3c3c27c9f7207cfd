"""`stage central`: noisy central images of each class."""

from __future__ import annotations

import numpy as np

from sfumato.config import Central
from sfumato.queries.central import query_central
from sfumato.queries.count import read_counts
from stages.runner import QueryRun

SENSITIVITY = {
    "mean": "max_norm of one image, clipped after pooling",
    "mode": "√d of one image's histogram, one bin of each pixel",
}


def central(run: QueryRun[Central]) -> None:
    settings, plan = run.settings, run.plan
    counts = read_counts(run.inputs["count"], plan.size_hint, len(plan.classes))
    released = f"{settings.statistic} images: {settings.repeats} of each class"
    charge = run.open_charge(released, SENSITIVITY[settings.statistic])
    images = query_central(
        charge,
        charge.sample_rate * counts.per_class,
        plan.shape,
        repeats=settings.repeats,
        statistic=settings.statistic,
        pool=settings.pool,
        bins=settings.bins,
        max_norm=settings.max_norm,
    )
    with run.releasing(charge) as directory:
        np.save(directory / f"{settings.statistic}.npy", images.float().numpy())
