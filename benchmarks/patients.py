"""What it costs to protect persons instead of images: accuracy under `unit: group` and `unit: image` at equal ε.

Patients are generated: geometric numbers of images, 1 to 30, of one class each or of all. The arm `image` holds one
image of each patient, so both have as many units, the same `size_hint`, and the same ε and δ. Hold-outs are those of
each arm. Recipe dp-merf with pixel features; every run has its own folder and noise. Rows are appended to a CSV file.

    OMP_NUM_THREADS=1 nice python benchmarks/patients.py --sets digits,fashion-mnist --epsilons 1,10 --seeds 0,1,2
    python benchmarks/patients.py --show
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from sfumato.pipeline import QUERIES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "patients.csv"
MEAN, MOST = 5, 30  # images of a patient
SETS = {
    "digits": {"auxiliary": {"steps": 1500, "images": 6000}, "frequency": {"size": 2000}, "classifiers": ["lr", "cnn"]},
    "fashion-mnist": {
        "auxiliary": {"steps": 500, "images": 10_000},
        "frequency": {"size": 4000},
        "classifiers": ["lr", "cnn"],
    },
}
COLUMNS = ("set", "classes", "unit", "epsilon", "seed", "patients", "lr", "cnn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default="digits")
    parser.add_argument("--classes", default="mixed,one", help="whether a patient's images are of several classes")
    parser.add_argument("--epsilons", default="1,10")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--show", action="store_true", help="print the table of the results so far, and stop")
    arguments = parser.parse_args()
    if arguments.show:
        table = pd.read_csv(arguments.results).groupby(["set", "classes", "epsilon", "unit"])[["lr", "cnn"]]
        return print((100 * table.agg(["mean", "std", "count"])).round(1).to_string())
    for name in arguments.sets.split(","):
        for classes in arguments.classes.split(","):
            for epsilon in map(float, arguments.epsilons.split(",")):
                for seed in map(int, arguments.seeds.split(",")):
                    for unit in ("group", "image"):
                        add(arguments.results, measure(name, classes, unit, epsilon, seed))


def patients_of(labels: np.ndarray, classes: str, seed: int) -> np.ndarray:
    """A patient for each image, (N,): neighbours in a random order, or among the images of one class."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(labels))
    if classes == "one":
        order = order[np.argsort(labels[order], kind="stable")]
    sizes = np.minimum(random.geometric(1 / MEAN, len(labels)), MOST)
    patients = np.empty(len(labels), dtype=np.int64)
    patients[order] = np.repeat(np.arange(len(sizes)), sizes)[: len(labels)]
    return patients


def images_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    if name == "digits":
        from sklearn.datasets import load_digits

        bunch = load_digits()
        return np.rint(bunch.images * (255 / 16)).astype(np.uint8), bunch.target.astype(np.int64)
    from sfumato.data.sources.idx import DEBIAN_FASHION_MNIST, read_idx

    folder = DEBIAN_FASHION_MNIST
    return read_idx(folder / "train-images-idx3-ubyte.gz"), read_idx(folder / "train-labels-idx1-ubyte.gz").astype(int)


def measure(name: str, classes: str, unit: str, epsilon: float, seed: int) -> dict:
    """One run, from a set of patients to the accuracies of classifiers trained on its release."""
    images, labels = images_of(name)
    patients = patients_of(labels, classes, seed)
    number = len(np.unique(patients))
    if unit == "image":  # one image of each patient
        order = np.random.default_rng(seed).permutation(len(patients))
        keep = order[np.unique(patients[order], return_index=True)[1]]
        images, labels = images[keep], labels[keep]
    settings = SETS[name]
    work = Path(tempfile.mkdtemp(prefix="patients-"))
    arrays = {"images": images, "labels": labels, "classes": np.array([str(i) for i in range(10)])}
    np.savez(work / "set.npz", **arrays, **({"groups": patients} if unit == "group" else {}))
    data = {"dataset_id": name, "source": "npz", "path": "set.npz"}
    params = {
        "recipe": "dp-merf",
        "profile": None,
        "seed": seed,
        "data": data | ({"groups": {"array": True}} if unit == "group" else {}),
        "privacy": {"epsilon": epsilon, "unit": unit, "size_hint": int(float(f"{0.8 * number:.1g}"))},
        "count": {"noise": "2%"},
        "frequency": settings["frequency"],
        "auxiliary": settings["auxiliary"],
        "synthesize": {"count": settings["auxiliary"]["images"]},
        "evaluate": {"classifiers": settings["classifiers"], "seeds": [0], "fidelity": [], "bound": False, "epochs": 8},
    }
    (work / "params.yaml").write_text(yaml.safe_dump(params))
    (work / "pipelines").symlink_to(ROOT / "pipelines")
    environment = os.environ | {"SFUMATO_STATE": str(work / "state"), "PYTHONPATH": str(ROOT)}
    others = [name for name in QUERIES if name not in ("count", "frequency")]  # switched off
    try:
        for words in (
            "prepare sensitive",
            "prepare public",
            "plan",
            *("count", "frequency", "auxiliary", "synthesize", *others),
            "ledger write",
            f"ledger check --unit {unit} --epsilon {epsilon:g}",
            "evaluate",
        ):
            command = [sys.executable, "-m", "stages.cli", *words.split()]
            done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{words}: {done.stderr}")
        found = json.loads((work / "metrics.json").read_text())["release"]
    finally:
        shutil.rmtree(work)
    about = {"set": name, "classes": classes, "unit": unit, "epsilon": epsilon, "seed": seed, "patients": number}
    return about | {classifier: found[classifier]["mean"] for classifier in settings["classifiers"]}


def add(results: Path, row: dict) -> None:
    results.parent.mkdir(parents=True, exist_ok=True)
    new = not results.exists()
    with results.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
    print(row, flush=True)


if __name__ == "__main__":
    main()
