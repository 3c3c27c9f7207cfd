"""Draw one picture for a public set: real images, and below them releases by recipe and ε.

    OMP_NUM_THREADS=1 python benchmarks/pictures.py digits --work WORK
    OMP_NUM_THREADS=1 python benchmarks/pictures.py fashion-mnist --work WORK
    # one folder per class
    OMP_NUM_THREADS=1 python benchmarks/pictures.py cifar10 --work WORK --path FOLDER

The first row shows real images: from the hold-out if the set may be shown, otherwise from the
recipe's public set. Each other row shows one release. It contains the release's first plain images
of each class, and no images are selected by their looks. A release that is already in WORK is not
made again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from recipe_table import BEFORE_PLAN, STAGES, prepare_folder, stage

from sfumato import load_release
from sfumato.data.images import ImageSet
from sfumato.data.store import load_prepared, load_public, read_card

GALLERY = Path(__file__).resolve().parent.parent / "docs" / "gallery"
EPSILONS = 10, 3, 1
COLUMNS = 20  # Largest number of images in a row
COUNT = 1000  # Images of a release; at least a quarter are plain
SETS: dict[str, tuple[list[str], dict[str, Any]]] = {  # recipes, and further settings
    "digits": (["teacher-mixed", "dp-merf"], {"profile": "digits"}),
    "fashion-mnist": (["teacher-generator"], {"profile": "fashion-mnist-cpu"}),
    "cifar10": (
        ["teacher-gaussian"],
        {
            "profile": "cifar10-cpu",
            "data": {
                "source": "imagefolder",
                "dataset_id": "cifar10-train",
                "size": 32,
                "channels": 3,
            },
            "privacy": {"size_hint": 40000, "lifetime_epsilon": "unlimited"},
        },
    ),
}


def released(folder: Path, shared: Path, params: dict) -> Path:
    """Run the recipe up to its release, if it has none yet. Returns the folder of the release."""
    release = folder / "artifacts" / "synthesize"
    if not (release / "card.json").is_file():
        prepare_folder(folder, shared, params)
        for command in [*BEFORE_PLAN, *([name] for name in STAGES)]:
            stage(*command)
    return release


def row_of(images: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Join the first images of each class in one row, with a white column after each.

    images: (N, H, W, C); labels: (N,). Returns (H, images in the row · (W + 1), C).
    """
    each = max(1, COLUMNS // classes)
    chosen = np.concatenate([np.flatnonzero(labels == label)[:each] for label in range(classes)])
    return np.concatenate(
        np.pad(images[chosen], [(0, 0), (0, 0), (0, 1), (0, 0)], constant_values=255), axis=1
    )


def draw(rows: dict[str, np.ndarray], file: Path) -> None:
    """Draw rows of images, each with its name on the left."""
    figure, axes = plt.subplots(len(rows), figsize=(10, 0.62 * len(rows)))
    for place, (name, row) in zip(axes, rows.items(), strict=True):
        place.imshow(row.squeeze(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        place.set(xticks=[], yticks=[])
        place.set_ylabel(name, rotation=0, ha="right", va="center")
        place.spines[:].set_visible(False)
    figure.subplots_adjust(left=0.2, right=0.995, top=0.995, bottom=0.005, hspace=0.06)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=SETS)
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for the runs and their private state"
    )
    parser.add_argument("--path", help="for cifar10: folder of class folders")
    given = parser.parse_args()
    recipes, settings = SETS[given.name]
    work, rows = given.work.resolve(), dict[str, np.ndarray]()
    settings |= {"seed": 0, "synthesize": {"count": COUNT}}
    settings["data"] = settings.get("data", {}) | (
        {"path": str(Path(given.path).resolve())} if given.path else {}
    )
    for recipe in recipes:
        for epsilon in EPSILONS:
            folder = work / f"{given.name}-{recipe}-{epsilon}"
            privacy = settings.get("privacy", {}) | {"epsilon": epsilon}
            release = released(
                folder,
                work / f"shared-{given.name}",
                settings | {"recipe": recipe, "privacy": privacy},
            )
            if not rows:
                name, real = real_images(given.name, folder)
                rows[name] = row_of(real.images, real.labels, len(real.classes))
            found = load_release(release, ["plain"])
            rows[f"{recipe}, ε = {epsilon}"] = row_of(
                found.images, found.labels, len(found.classes)
            )
        draw(rows, GALLERY / f"{given.name}-by-epsilon.png")


def real_images(name: str, folder: Path) -> tuple[str, ImageSet]:
    """Return a description of real images that may be shown, and the images."""
    card = read_card(folder / "data" / "sensitive" / "card.json")
    if name == "cifar10":
        return "public photographs", load_public(folder / "data" / "public", card.shape)
    return "real", load_prepared(folder / "state", card, "holdout")


if __name__ == "__main__":
    main()
