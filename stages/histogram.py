"""`stage histogram`: how many sensitive images look like each public class, noised."""

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
)


def histogram(
    config: Config = None,
    out: Out = None,
    card: CardPath = CARD,
    classifier: Annotated[Path, input_option("classifier")] = ARTIFACTS / "classifier",
    dry_run: DryRun = False,
) -> None:
    """Query: release noisy votes of the sensitive images for the public classes."""
    plan, out = load_plan("histogram", config), out or ARTIFACTS / "histogram"
    if dry_run:
        return describe(plan, {"card": card, "classifier": classifier}, out)
    from sfumato.artifacts import check_out, read_artifact, write_empty, writing

    if not plan.enabled:
        return write_empty(out, "histogram")
    import numpy as np

    from sfumato.compute import device
    from sfumato.errors import ConfigError, DataError
    from sfumato.features.public_network import load_resnet
    from sfumato.queries.histogram import query_histogram

    trained = read_artifact(classifier, "classifier")
    check_out(out, "histogram")
    if not trained.enabled:
        raise ConfigError(
            f"the histogram needs a public classifier, but {classifier} is empty: set classifier.enabled: true"
        )
    model = load_resnet(classifier).to(device())
    names = json.loads((classifier / "card.json").read_text(encoding="utf-8"))["classes"]
    votes, rows = plan.settings.votes, len(plan.classes) if plan.settings.per_class else None
    if model.shape != plan.shape:
        raise DataError(
            f"{classifier} was trained on images of shape {model.shape}, the sensitive ones have {plan.shape}: run `stage classifier` again"
        )
    if votes > model.classes:
        raise ConfigError(f"histogram.votes={votes} exceeds the {model.classes} public classes: lower it")
    released = f"votes of each image for {votes} of {model.classes} public classes" + (", by class" if rows else "")
    charge = open_stage_charge(
        plan, card, [trained], out, released, f"√{votes}: an image adds 1 to {votes} different counts"
    )
    if charge is None:
        return
    noisy = query_histogram(charge, model, votes, rows)
    with writing(out, "histogram", [trained], [charge.record]) as directory:
        np.save(directory / "histogram.npy", noisy.numpy(), allow_pickle=False)
        content = {"public_classes": names, "votes": votes, "per_class": plan.settings.per_class}
        (directory / "histogram.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    close_charge(charge, out)
