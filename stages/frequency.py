"""`stage frequency`: noisy joint Fourier embedding of images and labels."""

from __future__ import annotations

import json
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


def frequency(
    config: Config = None,
    out: Out = None,
    card: CardPath = CARD,
    count: Annotated[Path, input_option("count")] = ARTIFACTS / "count",
    dry_run: DryRun = False,
) -> None:
    """Query: release the noisy mean of random Fourier features of all images, by class."""
    plan, out = load_plan("frequency", config), out or ARTIFACTS / "frequency"
    if dry_run:
        return describe(plan, {"card": card, "count": count}, out)
    from sfumato.artifacts import check_out, read_artifact, write_empty, writing

    if not plan.enabled:
        return write_empty(out, "frequency")
    from safetensors.torch import save_file

    from sfumato.queries.frequency import FourierFeatures, query_frequency

    counts = read_artifact(count, "count")
    check_out(out, "frequency")
    settings = plan.settings
    features = FourierFeatures(plan.shape, settings.features, settings.size, plan.seed)
    charge = open_stage_charge(
        plan,
        card,
        [counts],
        out,
        f"joint embedding: {settings.size} Fourier features by class",
        "1: the features of an image have norm 1",
    )
    if charge is None:
        return
    released = query_frequency(charge, features, len(plan.classes), read_public_counts(counts, plan).total)
    with writing(out, "frequency", [counts], [charge.record]) as directory:
        save_file({"embedding": released.contiguous()}, directory / "embedding.safetensors")
        content = {
            "shape": plan.shape,
            "size": settings.size,
            "seed": plan.seed,
            "features": [f.model_dump(mode="json") for f in settings.features],
        }
        (directory / "features.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    close_charge(charge, out)
