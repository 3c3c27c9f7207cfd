"""`stage central`: noisy central images of each class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfumato.settings.stage import QUERY, Stage

if TYPE_CHECKING:
    from sfumato.planning.checks import Problems, Setup
    from sfumato.settings.queries import Central
    from stages.runner import QueryRun


def central(run: QueryRun, settings: Central) -> None:
    import numpy as np

    from sfumato.queries.central import central_norm, query_central

    shape = run.plan.shape
    released = f"{settings.statistic} images: {settings.repeats} of each class"
    bounds = {
        "mean": "max_norm of one image, clipped",
        "mode": "√d of one image's histogram, one bin of each pixel",
    }
    charge = run.open_charge(released, bounds[settings.statistic], central_norm(shape, settings))
    images = query_central(charge, charge.sample_rate * run.counts.per_class, shape, settings)
    with run.releasing(charge) as directory:
        np.save(directory / f"{settings.statistic}.npy", images.float().numpy())


def problems(setup: Setup) -> Problems:
    settings = setup.params.central
    if settings.statistic == "mode" and settings.max_norm is not None:
        yield (
            f"central.max_norm={settings.max_norm} cannot be used with central.statistic=mode, "
            "because the norm bound of the mode is fixed: remove central.max_norm"
        )


STAGE = Stage(
    "central",
    QUERY,
    "Release noisy central images: for each class, the mean or the mode of randomly drawn images.",
    "sfumato.settings.queries:Central",
    central,
    inputs=("count",),
    problems=problems,
)
