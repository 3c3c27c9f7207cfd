"""`stage saliency`: noisy gradient norms of the weight matrices, and the matrices to train."""

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
from stages.latents import ensure_latents, settled, show_memory


def saliency(
    config: Config = None,
    out: Out = None,
    card: CardPath = CARD,
    pretrain: Annotated[Path, input_option("pretrain")] = ARTIFACTS / "pretrain",
    count: Annotated[Path, input_option("count")] = ARTIFACTS / "count",
    dry_run: DryRun = False,
) -> None:
    """Query: release how strongly the sensitive images pull at each weight matrix, noised: `finetune` trains the most salient."""
    plan, out = load_plan("saliency", config), out or ARTIFACTS / "saliency"
    if dry_run:
        describe(plan, {"card": card, "pretrain": pretrain, "count": count}, out)
        return show_memory(plan)
    from sfumato.artifacts import check_out, read_artifact, write_empty, writing

    if not plan.enabled:
        return write_empty(out, "saliency")
    from sfumato.compute import device, settle_processor
    from sfumato.dpsgd.lora import load_base
    from sfumato.dpsgd.trainable import candidates
    from sfumato.queries.saliency import plot_saliency, query_saliency, rank_candidates, ranked, saliency_table

    settle_processor()
    inputs = [read_artifact(pretrain, "pretrain"), read_artifact(count, "count")]
    check_out(out, "saliency")
    settings, latents = settled(plan), ensure_latents(card, pretrain)
    model = load_base(pretrain).to(device())
    pool = candidates(model, settings.candidates)
    public_size = read_public_counts(inputs[1], plan).total
    released = f"gradient of {len(pool)} candidates ({settings.candidates}, score {settings.score})"
    charge = open_stage_charge(
        plan, card, inputs, out, released, "max_norm: the jointly clipped gradient of one image", latents=latents
    )
    if charge is None:
        return
    assert plan.mechanism is not None and plan.model is not None
    vectors = query_saliency(
        charge,
        model,
        pool,
        settings,
        public_size,
        label_dropout=plan.model.label_dropout,
        autocast=None if latents else False,
    )
    noise_std = (
        plan.mechanism.noise_multiplier * settings.max_norm / public_size
    )  # public; the noise itself was added by the charge
    rows = rank_candidates(vectors, noise_std)
    with writing(out, "saliency", inputs, [charge.record]) as directory:
        (directory / "saliency.csv").write_text(saliency_table(rows), encoding="utf-8")
        content = {
            "candidates": settings.candidates,
            "score": settings.score,
            "noise_std": noise_std,
            "ranked": {
                "debiased": [pool[name] for name in ranked(rows, True)],
                "raw": [pool[name] for name in ranked(rows, False)],
            },
        }
        (directory / "saliency.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        plot_saliency(rows, directory / "saliency.png")
    close_charge(charge, out)
