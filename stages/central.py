"""`stage central`: noisy central images of each class."""

import numpy as np

from sfumato.queries.central import central_norm, query_central
from sfumato.settings.queries import Central
from stages.runner import QueryRun


def central(run: QueryRun, settings: Central) -> None:
    shape = run.plan.shape
    released = f"{settings.statistic} images: {settings.repeats} of each class"
    bounds = {"mean": "max_norm of one image, clipped", "mode": "√d of one image's histogram, one bin of each pixel"}
    charge = run.open_charge(released, bounds[settings.statistic], central_norm(shape, settings))
    images = query_central(charge, charge.sample_rate * run.counts.per_class, shape, settings)
    with run.releasing(charge) as directory:
        np.save(directory / f"{settings.statistic}.npy", images.float().numpy())
