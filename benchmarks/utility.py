"""Run the utility protocol of DP-Diffusion (§5.6, §6) on a release.

The protocol covers accuracy by number of images, ensembles and model selection.

    OMP_NUM_THREADS=1 python benchmarks/utility.py --classifiers cnn --sizes 1000,5000
        [--parts sizes,ensemble]

Run this program in the folder of a project with a release. The results are local, because they are
measured on real images; the journal records that the images were opened. `--parts selection` tests
whether a third party who has only the release would choose the best model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from csv_tables import csv_of
from protocol import accuracy_by_size, ensemble, grid, model_selection, plot_protocol, subset

from sfumato.data.images import load_images
from sfumato.data.prepare import secret_key
from sfumato.data.store import read_card
from sfumato.evaluation.downstream import schedule_of
from sfumato.evaluation.identity import identity
from sfumato.evaluation.scores import check_fits
from sfumato.privacy.authorize import open_local
from sfumato.runtime.compute import keep_freed_memory
from sfumato.settings.stage import ARTIFACTS, CARD_PATH
from sfumato.storage.artifacts import read_artifact
from sfumato.storage.files import write_local
from stages.runner import load_plan
from stages.state import EVALUATION, check_local, state_dir

PARTS = ("sizes", "ensemble", "selection")
SIZES = (1000, 5000, 20_000, 60_000)

SIZES_HELP = (
    "Numbers of synthetic images. Default: 1000, 5000, 20000 and 60000, up to the size of the "
    "release."
)


def main(
    out: Annotated[
        Path, typer.Option(help="Directory for utility.json, two tables and utility.png.")
    ] = EVALUATION,
    parts: Annotated[str, typer.Option(help="Parts to run, separated by commas.")] = ",".join(
        PARTS
    ),
    classifiers: Annotated[
        str, typer.Option(help="Classifiers for the parts sizes and ensemble.")
    ] = "cnn",
    sizes: Annotated[str, typer.Option(help=SIZES_HELP)] = "",
    members: Annotated[
        int, typer.Option("--ensemble", min=2, help="Classifiers in an ensemble.")
    ] = 5,
    grid_classifiers: Annotated[
        str, typer.Option(help="Classifiers to select among.")
    ] = "lr,mlp,cnn",
    rates: Annotated[
        str, typer.Option(help="Factors on the learning rate to select among.")
    ] = "0.01,0.1,0.3,1,3",
    decays: Annotated[
        str, typer.Option("--weight-decays", help="Weight decays to select among.")
    ] = "0,0.1",
    retrain: Annotated[
        bool, typer.Option("--retrain", help="In the selection, also train on real images.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Gradient steps to train each classifier for.")
    ] = None,
) -> None:
    """Measure the effects of the number of images, of ensembles, and of model selection.

    Results are local.
    """
    plan, synthesize = load_plan("evaluate"), ARTIFACTS / "synthesize"
    check_local("--out", out / "utility.json")
    keep_freed_memory()
    read_artifact(synthesize, "synthesize")
    release, seeds = load_images(synthesize, plan.classes), plan.settings.seeds
    counts = (
        sorted(map(int, sizes.split(",")))
        if sizes
        else [n for n in SIZES if n <= len(release)] or [len(release)]
    )
    names, gridded, wanted = (text.split(",") for text in (classifiers, grid_classifiers, parts))
    settings = grid(
        gridded,
        [float(text) for text in rates.split(",")],
        [float(text) for text in decays.split(",")],
    )
    epochs, asked = plan.settings.epochs, steps or plan.settings.steps
    schedules = {
        name: schedule_of(name, counts[-1], epochs, asked)
        for name in dict.fromkeys([*names, *gridded])
    }

    train, holdout = open_local(state_dir(), read_card(CARD_PATH), "utility")
    for name, image_set in {
        "release": release,
        "real training": train,
        "hold-out": holdout,
    }.items():
        check_fits(name, image_set, train)
    key, version = secret_key(state_dir(), plan.dataset_id), read_card(CARD_PATH).version
    found: dict = {
        "scope": "local",
        "identity": identity(plan, key, version, train, holdout, None, synthesize),
    }
    found["steps"] = {name: schedule.steps for name, schedule in schedules.items()}
    largest = subset(release, counts[-1])
    for name in names:
        if "sizes" in wanted:
            rows = accuracy_by_size(name, release, holdout, counts, schedules[name], seeds, print)
            found.setdefault("sizes", {})[name] = rows
        if "ensemble" in wanted:
            whole = ensemble(name, largest, holdout, schedules[name], members, print)
            found.setdefault("ensemble", {})[name] = whole
    if "selection" in wanted:
        bases = [schedules[setting.classifier] for setting in settings]
        found["selection"] = model_selection(
            settings, bases, largest, holdout, train if retrain else None, print
        )

    write_local(out / "utility.json", (json.dumps(found, indent=1) + "\n").encode())
    curves = [(name, row) for name, rows in found.get("sizes", {}).items() for row in rows]
    sized = [
        {"classifier": name, "members": 1, "accuracy": row["mean"]} | row for name, row in curves
    ]
    sized += [{"classifier": name} | row for name, row in found.get("ensemble", {}).items()]
    if sized:
        table = pd.DataFrame(sized).reindex(
            columns=["classifier", "images", "members", "accuracy", "std"]
        )
        write_local(out / "utility.csv", csv_of(table).encode())
    if "selection" in found:
        write_local(
            out / "selection.csv", csv_of(pd.DataFrame(found["selection"]["settings"])).encode()
        )
    if found.keys() & {"sizes", "selection"}:
        plot_protocol(found, out / "utility.png")
    print(f"{out / 'utility.json'}: local, not to be shared")


if __name__ == "__main__":
    typer.run(main)
