"""`stage auxiliary`: the one-step generator that the frequency release teaches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from stages.common import (
    ARTIFACTS,
    Config,
    DryRun,
    Out,
    describe,
    input_option,
    load_plan,
    progress,
    read_public_counts,
)


def auxiliary(
    config: Config = None,
    out: Out = None,
    frequency: Annotated[Path, input_option("frequency")] = ARTIFACTS / "frequency",
    count: Annotated[Path, input_option("count")] = ARTIFACTS / "count",
    dry_run: DryRun = False,
) -> None:
    """Free: fit a generator to the noisy embedding, and draw images from it."""
    plan, out = load_plan("auxiliary", config), out or ARTIFACTS / "auxiliary"
    if dry_run:
        return describe(plan, {"frequency": frequency, "count": count}, out)
    from sfumato.artifacts import read_artifact, write_empty, writing

    if not plan.enabled:
        return write_empty(out, "auxiliary")
    from safetensors.torch import load_file

    from sfumato.compute import device, settle_processor
    from sfumato.config import FeatureMap
    from sfumato.data.images import ImageSet, as_uint8, save_images, save_png, to_grid
    from sfumato.queries.frequency import FourierFeatures
    from sfumato.warmup.generator import draw_images, fit_generator, save_generator

    settle_processor()
    inputs = [read_artifact(frequency, "frequency"), read_artifact(count, "count")]
    about = json.loads((frequency / "features.json").read_text(encoding="utf-8"))
    features = FourierFeatures(
        tuple(about["shape"]), [FeatureMap(**f) for f in about["features"]], about["size"], about["seed"]
    )
    target = load_file(frequency / "embedding.safetensors")["embedding"].to(device())
    priors = read_public_counts(inputs[1], plan).priors
    with progress("auxiliary") as report:
        generator = fit_generator(
            target, features, plan.settings, priors, plan.shape, len(plan.classes), plan.seed, report
        )
    images, labels = draw_images(generator, plan.settings.images, priors, plan.seed + 1)
    with writing(out, "auxiliary", inputs) as directory:
        save_generator(generator, directory)
        save_images(directory, ImageSet(as_uint8(images), labels.numpy(), plan.classes))
        save_png(directory / "grid.png", to_grid(images[:100], 10))
