"""Measure the teacher's accuracy on CIFAR-10 by ε, at δ = 1e-5, without public photographs.

    # the official split, which is downloaded
    OMP_NUM_THREADS=1 python benchmarks/cifar10_teacher.py
    # the training split, in class folders
    OMP_NUM_THREADS=1 python benchmarks/cifar10_teacher.py --folder cifar10

The first command measures the accuracy for a leaderboard: it trains on 50 000 images, and reads the
official test split once for each ε. With --folder, a fifth of the images, chosen by a key, is held
out.
The public images are textures that a program draws, and the filters of the feature map are patches
of textures. The directions of the map are fitted to the images of a generator. The cost of the
generator is part of ε. The recipe is `teacher-gaussian`. It is run only up to the teacher, so that
no synthetic set is made. Settings were fixed before the first run. Rows are appended to a CSV file.
A combination of split, ε and seed that the file contains is not run again.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import tempfile
import time
from pathlib import Path

import yaml
from recipe_table import ROOT, stage

from sfumato.data.store import read_card
from sfumato.evaluation.scores import released_accuracy
from sfumato.features.teacher_network import load_teacher_network
from sfumato.privacy.authorize import open_local
from sfumato.privacy.events import ADD_OR_REMOVE_ONE
from sfumato.privacy.ledger import spent_on_one
from sfumato.runtime.compute import keep_freed_memory
from sfumato.settings.stage import ARTIFACTS, CARD_PATH
from sfumato.storage.artifacts import read_artifact
from stages.state import state_dir

RESULTS = ROOT / "benchmarks" / "results" / "cifar10-teacher.csv"
DELTA = 1e-5
STAGES = ("prepare public", "plan", "count", "covariance", "auxiliary", "teacher")
COLUMNS = (
    "split",
    "epsilon",
    "delta",
    "spent",
    "seed",
    "held out",
    "accuracy",
    "low",
    "high",
    "worst",
    "minutes",
)


def params_of(folder: Path | None, epsilon: float, seed: int) -> dict:
    """Build the settings of the project. folder: class folders; None for the official split."""
    data: dict = {"source": "cifar10", "dataset_id": "cifar10"}
    if folder is not None:
        about = {
            "source": "imagefolder",
            "path": str(folder),
            "size": 32,
            "channels": 3,
            "holdout_fraction": 0.2,
        }
        data = {"dataset_id": "cifar10-train"} | about
    return {
        "recipe": "teacher-gaussian",
        # `synthesize` is planned, but not run
        "run": ["count", "covariance", "auxiliary", "teacher", "synthesize"],
        "profile": "cifar10-cpu",
        "seed": seed,
        "data": data,
        "public": {"source": "procedural", "per_class": 900},
        "privacy": {"epsilon": epsilon, "delta": DELTA, "accountant": "exact", "size_hint": 40_000},
        "teacher": {"feature": "patches", "flip": True, "dimension": 2048},
    }


def measure(folder: Path | None, epsilon: float, seed: int) -> dict:
    """Measure one teacher, in a temporary project."""
    work = Path(tempfile.mkdtemp(prefix="cifar10-"))
    (work / "pipelines").symlink_to(ROOT / "pipelines")
    (work / "params.yaml").write_text(yaml.safe_dump(params_of(folder, epsilon, seed)))
    os.environ["SFUMATO_STATE"] = str(work / "state")
    home = Path.cwd()
    os.chdir(work)
    try:
        stage("prepare", "sensitive")
        start = time.perf_counter()
        for command in STAGES:
            stage(*command.split())
        minutes = (time.perf_counter() - start) / 60
        holdout = open_local(state_dir(), read_card(CARD_PATH), "accuracy of the teacher")[1]
        found = released_accuracy(load_teacher_network(ARTIFACTS / "teacher"), holdout)
        records = read_artifact(ARTIFACTS / "teacher", "teacher").records
        spent = spent_on_one(records, DELTA, "exact", ADD_OR_REMOVE_ONE)
    finally:
        os.chdir(home)
        shutil.rmtree(work)
    low, high = found["interval"]
    worst = min(row["mean"] for row in found["per_class"])
    shares = {"accuracy": found["accuracy"], "low": low, "high": high, "worst": worst}
    return {
        "split": "official" if folder is None else "training",
        "epsilon": epsilon,
        "delta": DELTA,
        "spent": round(spent, 4),
        "seed": seed,
        "held out": len(holdout),
        **{name: round(100 * value, 2) for name, value in shares.items()},
        "minutes": round(minutes, 1),
    }


def rows_of(results: Path) -> list[dict]:
    if not results.exists():
        return []
    with results.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="the training split in class folders; default: the official split, downloaded",
    )
    parser.add_argument("--epsilons", default="1,2,4,8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    keep_freed_memory()
    folder = arguments.folder and arguments.folder.resolve()
    results = arguments.results.resolve()
    split = "official" if folder is None else "training"
    for epsilon in map(float, arguments.epsilons.split(",")):
        known = [
            (row["split"], float(row["epsilon"]), int(row["seed"])) for row in rows_of(results)
        ]
        if (split, epsilon, arguments.seed) in known:
            continue
        row = measure(folder, epsilon, arguments.seed)
        with results.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if not known:
                writer.writeheader()
            writer.writerow(row)
        print(row, flush=True)


if __name__ == "__main__":
    main()
