"""`stage synthesize`: the release — images and labels drawn from the models that the privacy budget bought."""

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


def synthesize(
    config: Config = None,
    out: Out = None,
    finetune: Annotated[Path, input_option("finetune")] = ARTIFACTS / "finetune",
    pretrain: Annotated[Path, input_option("pretrain")] = ARTIFACTS / "pretrain",
    auxiliary: Annotated[Path, input_option("auxiliary")] = ARTIFACTS / "auxiliary",
    count: Annotated[Path, input_option("count")] = ARTIFACTS / "count",
    dry_run: DryRun = False,
) -> None:
    """Free: draw the synthetic set. What this writes may be shared."""
    plan, out = load_plan("synthesize", config), out or ARTIFACTS / "synthesize"
    settings = plan.settings
    paths = {"finetune": finetune, "pretrain": pretrain, "auxiliary": auxiliary}
    if dry_run:
        return describe(plan, {**{name: paths[name] for name in settings.sources}, "count": count}, out)
    from sfumato.artifacts import check_out, merge_records, read_artifact, writing
    from sfumato.compute import settle_processor
    from sfumato.data.images import ImageSet, as_uint8, save_images, save_png, to_grid
    from sfumato.errors import ConfigError
    from sfumato.release.card import dataset_card
    from sfumato.release.exports import NPZ, PARQUET, PNG, check_parquet, save_npz, save_parquet, save_png_folders
    from sfumato.release.synthesis import draw_mixture, sorted_examples

    settle_processor()
    check_out(out, "synthesize")
    if "parquet" in settings.export:
        check_parquet()  # before anything slow
    counts = read_artifact(count, "count")
    inputs = {name: read_artifact(paths[name], name) for name in settings.sources}
    for name, artifact in inputs.items():
        if not artifact.enabled:
            raise ConfigError(
                f"synthesize.sources names {name}, but {artifact.path} is the empty artifact of a stage that is switched off"
            )
    priors = read_public_counts(counts, plan).priors if settings.labels == "prior" else None
    with progress("synthesize") as report:
        images, labels, origins = draw_mixture(paths, settings, priors, plan.seed, report, plan.shape)
    behind = [*inputs.values(), counts]
    with writing(out, "synthesize", behind) as directory:
        released = ImageSet(as_uint8(images), labels.numpy(), plan.classes)
        save_images(directory, released)
        save_png(directory / "grid.png", to_grid(sorted_examples(images, labels, len(plan.classes), per_class=10), 10))
        if "png" in settings.export:
            save_png_folders(directory / PNG, released)
        if "npz" in settings.export:
            save_npz(directory / NPZ, released)
        if "parquet" in settings.export:
            save_parquet(directory / PARQUET, released)
        card = {
            "images": len(images),
            "shape": list(plan.shape),
            "range": [0, 255],
            "classes": list(plan.classes),
            "sources": origins,
            "labels": settings.labels,
            "synthetic": True,
            "privacy": "differentially private; privacy.json holds every mechanism that was paid for, ledger.json composes them",
        }
        (directory / "card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        text = dataset_card(
            dataset_id=plan.dataset_id,
            shape=plan.shape,
            classes=plan.classes,
            per_class=labels.bincount(minlength=len(plan.classes)).tolist(),
            sources=origins,
            size_hint=plan.size_hint,
            records=merge_records(behind),
            export=settings.export,
        )
        (directory / "README.md").write_text(text, encoding="utf-8")
