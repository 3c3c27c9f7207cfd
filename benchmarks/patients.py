"""Measure what protecting persons instead of images costs: compare `unit: group` and `unit: image`.

Images are assigned to invented patients. A patient's number of images is drawn from a geometric
distribution, and is at most 30. With `--classes mixed`, a patient's images are of any class. With
`one`, almost all patients have images of only one class. The arm `group` uses all images; the arm
`image` uses one image of each patient. So both arms have the same number of units, `size_hint`, ε
and δ. Both are tested on the same real images, which belong to no patient. The recipe is dp-merf
with pixel features, and every run has its own folder and noise. Rows are appended to a CSV file.

    OMP_NUM_THREADS=1 nice python benchmarks/patients.py --sets digits,fashion-mnist
        --epsilons 1,10 --seeds 0,1,2
    python benchmarks/patients.py --show
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from sfumato import load_release
from sfumato.data.images import ImageSet
from sfumato.data.sources.idx import DEBIAN_FASHION_MNIST, read_idx
from sfumato.evaluation.downstream import fit_classifier, schedule_of
from sfumato.settings.stages import QUERIES
from sfumato.training.supervised import accuracy

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "patients.csv"
MEAN, MOST = 5, 30  # mean and largest number of a patient's images
CLASSES = tuple(str(i) for i in range(10))
SETS = {  # number of images of all patients together, number of test images, and settings
    "digits": (
        1300,
        497,
        {"auxiliary": {"steps": 1500, "images": 6000}, "frequency": {"size": 2000}},
    ),
    "fashion-mnist": (
        20_000,
        10_000,
        {"auxiliary": {"steps": 400, "images": 8000}, "frequency": {"size": 4000}},
    ),
}
CLASSIFIERS = ("lr", "cnn")
ALL = (
    "import sys; from stages.cli import app; [app(x.split(), standalone_mode=False) for x in "
    "sys.argv[1:]]"
)
COLUMNS = ("set", "classes", "unit", "epsilon", "seed", "patients", "lr", "cnn")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", default="digits")
    parser.add_argument(
        "--classes", default="mixed,one", help="classes of a patient's images: any (mixed) or one"
    )
    parser.add_argument("--epsilons", default="1,10")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--show", action="store_true", help="only print the table of the results so far"
    )
    arguments = parser.parse_args()
    if arguments.show:
        table = pd.read_csv(arguments.results).groupby(["set", "classes", "epsilon", "unit"])[
            ["lr", "cnn"]
        ]
        return print((100 * table.agg(["mean", "std", "count"])).round(1).to_string())
    for name in arguments.sets.split(","):
        for classes in arguments.classes.split(","):
            for epsilon in map(float, arguments.epsilons.split(",")):
                for seed in map(int, arguments.seeds.split(",")):
                    for unit in ("group", "image"):
                        add(arguments.results, measure(name, classes, unit, epsilon, seed))


def patients_of(labels: np.ndarray, classes: str, seed: int) -> np.ndarray:
    """Assign a patient to each image, (N,), at random.

    classes: "one" to give almost all patients images of one class only: the images are sorted by
    class before they are divided among the patients.
    """
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
    folder = DEBIAN_FASHION_MNIST
    return read_idx(folder / "train-images-idx3-ubyte.gz"), read_idx(
        folder / "train-labels-idx1-ubyte.gz"
    ).astype(int)


def measure(name: str, classes: str, unit: str, epsilon: float, seed: int) -> dict:
    """Make one release of a set of patients, and measure classifiers that are trained on it."""
    size, tests, settings = SETS[name]
    images, labels = images_of(name)
    order = np.random.default_rng(seed).permutation(len(images))
    tested = ImageSet(images[order[-tests:], ..., None], labels[order[-tests:]], CLASSES)
    images, labels = images[order[:size]], labels[order[:size]]
    patients = patients_of(labels, classes, seed)
    number = len(np.unique(patients))
    if unit == "image":  # one image of each patient, so as many units as for "group"
        keep = np.unique(patients, return_index=True)[1]
        images, labels = images[keep], labels[keep]
    work = Path(tempfile.mkdtemp(prefix="patients-"))
    arrays: dict[str, Any] = {"images": images, "labels": labels, "classes": np.array(CLASSES)}
    if unit == "group":
        arrays["groups"] = patients
    np.savez(work / "set.npz", **arrays)
    data = {"dataset_id": name, "source": "npz", "path": "set.npz", "holdout_fraction": 0.02}
    params = {
        "recipe": "dp-merf",
        "run": ["count", "frequency", "auxiliary", "synthesize"],
        "profile": None,
        "seed": seed,
        "data": data | ({"groups": {"array": True}} if unit == "group" else {}),
        "privacy": {"epsilon": epsilon, "unit": unit, "size_hint": int(float(f"{number:.1g}"))},
        "count": {"noise": "2%"},
        **settings,
        "synthesize": {"count": settings["auxiliary"]["images"]},
    }
    (work / "params.yaml").write_text(yaml.safe_dump(params))
    (work / "pipelines").symlink_to(ROOT / "pipelines")
    environment = os.environ | {"SFUMATO_STATE": str(work / "state"), "PYTHONPATH": str(ROOT)}
    others = [name for name in QUERIES if name not in ("count", "frequency")]  # switched off
    commands = [
        *(
            "prepare sensitive",
            "prepare public",
            "plan",
            "count",
            "frequency",
            "auxiliary",
            "synthesize",
            *others,
        ),
        "ledger write",
    ]
    try:
        words = [sys.executable, "-c", ALL, *commands]
        done = subprocess.run(
            words, cwd=work, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        release = load_release(work / "artifacts" / "synthesize")
        found = {}
        for classifier in CLASSIFIERS:
            schedule = schedule_of(classifier, len(release.images), 8)
            trained = fit_classifier(
                classifier, np.array(release.images), np.array(release.labels), 10, schedule, seed
            )
            found[classifier] = accuracy(trained, tested)
    finally:
        shutil.rmtree(work)
    about = {
        "set": name,
        "classes": classes,
        "unit": unit,
        "epsilon": epsilon,
        "seed": seed,
        "patients": number,
    }
    return about | found


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
