"""Measure how well classifiers learn from releases, by image size, number of units and ε.

    OMP_NUM_THREADS=1 python benchmarks/by_size.py NAME FOLDER --sizes 8,16,32 [--units 500,1000]
        [--epsilons 1,10] [--minutes 4] [--groups PATTERN] [--work WORK]

NAME: name of the set in the rows. FOLDER: public images in class folders, used as the sensitive
ones. --units: how many units to use, chosen at random. A unit is a person with --groups, otherwise
an image. Each combination of size, number of units and ε is run as one project, with the settings
that `stage init` proposes and with its own hold-out, which the project's key selects. A row
contains a project's balanced accuracies in %, measured on this hold-out at the project's image
size:

- `release`: the best classifier trained on the release;
- `teacher`: the teacher;
- `real`: the best classifier trained on real images.

Rows that are already in `results/sizes.csv` are not measured again.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "sizes.csv"
KEYS = ["set", "units", "epsilon", "size", "minutes"]
COLUMNS = [*KEYS, "classes", "release", "teacher", "real"]


def subset(folder: Path, units: int, groups: str | None, seed: int, out: Path) -> int:
    """Copy the pictures of `units` random persons or, without `groups`, `units` random pictures.

    With `units` 0, all pictures are copied. Returns the number of units.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    unit_of = [
        match[1] if groups and (match := re.search(groups, path.name)) else path.as_posix()
        for path in files
    ]
    names = sorted({*unit_of})
    chosen = {*np.random.default_rng(seed).permutation(names)[: units or None].tolist()}
    for path, unit in zip(files, unit_of, strict=True):
        if unit in chosen:
            place = out / path.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    return len(chosen)


def run(images: Path, project: Path, about: dict[str, Any]) -> dict[str, float]:
    """Run one project. Returns its balanced accuracies in %, and its number of classes."""
    import sfumato

    made = sfumato.Project.create(project, images=images, **about)
    classes = len(made.run().classes)
    shares = made.verdict["balanced_accuracy"]
    rows = {
        name: round(100 * shares[name], 1)
        for name in ("release", "teacher", "real")
        if name in shares
    }
    return {"classes": classes} | rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--units", default="0", help="numbers of units; 0: all")
    parser.add_argument("--epsilons", default="1,10")
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument(
        "--groups", help="regular expression for file names; its first group is the person's id"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random subset")
    parser.add_argument(
        "--work", type=Path, help="folder of the projects; default: a temporary folder"
    )
    given = parser.parse_args()
    work = (given.work or Path(tempfile.mkdtemp(prefix="sizes-"))).resolve()
    rows = list(csv.DictReader(RESULTS.open())) if RESULTS.is_file() else []
    before = {tuple(row[key] for key in KEYS) for row in rows}
    sweep = itertools.product(
        given.units.split(","), given.epsilons.split(","), given.sizes.split(",")
    )
    for units, epsilon, size in sweep:
        images = work / f"images-{given.name}-{units}-{given.seed}"
        row = {
            "set": given.name,
            "units": units,
            "epsilon": epsilon,
            "size": size,
            "minutes": f"{given.minutes:g}",
        }
        if tuple(row[key] for key in KEYS) in before:
            continue
        name = "-".join(row.values()).replace(" ", "-")
        os.environ["SFUMATO_STATE"] = str(work / f"state-{name}")
        os.environ["DVC_SITE_CACHE_DIR"] = str(work / f"dvc-{name}")
        # a killed run may have left these folders
        for folder in (images, work / name, work / f"state-{name}"):
            shutil.rmtree(folder, ignore_errors=True)
        subset(given.folder, int(units), given.groups, given.seed, images)
        about: dict[str, Any] = {
            "epsilon": float(epsilon),
            "minutes": given.minutes,
            "size": int(size),
        }
        about |= {"groups": given.groups} if given.groups else {"one_image_each": True}
        found = run(images, work / name, about | {"dataset_id": "sizes"})
        with RESULTS.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if not RESULTS.stat().st_size:
                writer.writeheader()
            writer.writerow(row | found)
        print(row | found, flush=True)


if __name__ == "__main__":
    main()
