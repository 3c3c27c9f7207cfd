"""`stage count`: noisy class counts, for denominators and label priors."""

from __future__ import annotations

import json

from stages.common import (
    ARTIFACTS,
    CARD,
    CardPath,
    Config,
    DryRun,
    Out,
    close_charge,
    describe,
    load_plan,
    open_stage_charge,
)


def count(config: Config = None, out: Out = None, card: CardPath = CARD, dry_run: DryRun = False) -> None:
    """Query: release noisy class counts of the sensitive images."""
    plan, out = load_plan("count", config), out or ARTIFACTS / "count"
    if dry_run:
        return describe(plan, {"card": card}, out)
    from sfumato.artifacts import check_out, write_empty, writing

    if not plan.enabled:
        return write_empty(out, "count")
    from sfumato.queries.count import public_counts, query_count

    check_out(out, "count")
    charge = open_stage_charge(plan, card, [], out, "class counts", "1: an image is in one class")
    if charge is None:
        return
    noisy = query_count(charge, len(plan.classes))
    assert plan.mechanism is not None
    counts = public_counts(noisy, plan.mechanism.noise_multiplier)
    with writing(out, "count", records=[charge.record]) as directory:
        content = {
            "total": counts.total,
            "per_class": counts.per_class.tolist(),
            "priors": counts.priors.tolist(),
            "noisy": noisy.tolist(),
        }
        (directory / "counts.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    close_charge(charge, out)
