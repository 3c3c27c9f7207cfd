"""`stage select`: the public images that the warm-up sees, by the noisy votes for their classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from stages.common import ARTIFACTS, PUBLIC, Config, DryRun, Out, PublicPath, describe, input_option, load_plan


def select(
    config: Config = None,
    out: Out = None,
    histogram: Annotated[Path, input_option("histogram")] = ARTIFACTS / "histogram",
    public: PublicPath = PUBLIC,
    dry_run: DryRun = False,
) -> None:
    """Free: keep the public classes with the most votes; by sensitive class, their images take its label."""
    plan, out = load_plan("select", config), out or ARTIFACTS / "select"
    if dry_run:
        return describe(plan, {"histogram": histogram, "public": public}, out)
    from sfumato.artifacts import check_out, read_artifact, write_empty, writing

    if not plan.enabled:
        return write_empty(out, "select")
    import csv

    import numpy as np

    from sfumato.data.images import load_array
    from sfumato.data.store import load_public
    from sfumato.errors import DataError
    from sfumato.warmup.selection import (
        number_to_keep,
        plot_selection,
        relabel,
        select_all,
        select_classes,
        selection_rows,
    )

    check_out(out, "select")
    counted, inputs = read_artifact(histogram, "histogram"), [read_artifact(public, "public")]
    images = load_public(public, plan.shape)
    names, keep = images.classes, number_to_keep(plan.settings, len(images.classes))
    votes, per_class = None, False
    if counted.enabled:
        inputs.append(counted)
        votes = load_array(histogram / "histogram.npy")
        about = json.loads((histogram / "histogram.json").read_text(encoding="utf-8"))
        per_class = about["per_class"]
        if tuple(about["public_classes"]) != names or votes.shape != (
            len(plan.classes) if per_class else 1,
            len(names),
        ):
            raise DataError(
                f"{histogram} counted votes for other classes than those of {public}: run `stage classifier` and `stage histogram` again"
            )
    kept = select_all(len(names), keep) if votes is None else select_classes(votes, keep)
    indices, labels = relabel(images.labels, kept, len(names), per_class)
    with writing(out, "select", inputs) as directory:
        np.save(directory / "indices.npy", indices, allow_pickle=False)
        np.save(directory / "labels.npy", labels, allow_pickle=False)
        with (directory / "selection.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(
                selection_rows(kept, names, plan.classes if per_class else None)
            )
        chosen = [names[choice.public] for choice in kept]
        content = {
            "labels": "sensitive" if per_class else "public",
            "classes": list(plan.classes) if per_class else chosen,  # by label
            "kept": chosen,  # by rank
            "images": len(indices),
        }
        (directory / "selection.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        plot_selection(directory / "selection.png", images, kept, votes, plan.classes if per_class else None)
