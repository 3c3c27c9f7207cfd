"""`stage central`: noisy central images of each class."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from stages.common import (
    ARTIFACTS,
    CARD,
    CardPath,
    Config,
    DryRun,
    Out,
    close_charge,
    describe,
    input_option,
    load_plan,
    open_stage_charge,
    read_public_counts,
)


def central(
    config: Config = None,
    out: Out = None,
    card: CardPath = CARD,
    count: Annotated[Path, input_option("count")] = ARTIFACTS / "count",
    dry_run: DryRun = False,
) -> None:
    """Query: release noisy central images, the mean or the mode of a draw of each class."""
    plan, out = load_plan("central", config), out or ARTIFACTS / "central"
    if dry_run:
        return describe(plan, {"card": card, "count": count}, out)
    from sfumato.artifacts import check_out, read_artifact, write_empty, writing

    if not plan.enabled:
        return write_empty(out, "central")
    import numpy as np

    from sfumato.queries.central import query_central

    counts = read_artifact(count, "count")
    check_out(out, "central")
    settings = plan.settings
    charge = open_stage_charge(
        plan,
        card,
        [counts],
        out,
        f"{settings.statistic} images: {settings.repeats} of each class",
        "max_norm of one image, clipped after pooling"
        if settings.statistic == "mean"
        else "√d of one image's histogram, one bin of each pixel",
    )
    if charge is None:
        return
    released = query_central(
        charge,
        charge.sample_rate * read_public_counts(counts, plan).per_class,
        plan.shape,
        repeats=settings.repeats,
        statistic=settings.statistic,
        pool=settings.pool,
        bins=settings.bins,
        max_norm=settings.max_norm,
    )
    with writing(out, "central", [counts], [charge.record]) as directory:
        np.save(directory / f"{settings.statistic}.npy", released.float().numpy())
    close_charge(charge, out)
