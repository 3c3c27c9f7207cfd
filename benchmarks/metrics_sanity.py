"""Do the fidelity metrics say what they should? Image sets of known quality are compared with real Fashion-MNIST.

    python benchmarks/metrics_sanity.py [--images 5000] [--folder /usr/share/datasets/fashion-mnist] [--plots DIR]

Rows: unseen real images; the same with noise, blurred, of three classes only; copies of training images, all or half;
uniform noise.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from sfumato.data.images import ImageSet
from sfumato.data.rendered import drawn_set
from sfumato.data.sources.idx import read_idx
from sfumato.evaluation.extractors import embedded_extractor
from sfumato.evaluation.metrics.fidelity import fidelity
from sfumato.evaluation.plots import plot_neighbours
from sfumato.settings.evaluate import Evaluate

CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SHOWN = (
    "frechet",
    "mmd",
    "precision",
    "recall",
    "density",
    "coverage",
    "fld",
    "generalisation_gap",
    "authenticity",
    "distance_ratio",
)


def rows_of_known_quality(
    train: np.ndarray, fresh: np.ndarray, labels: np.ndarray, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """train, fresh: (N, 28, 28, 1) uint8; labels: (N,) of `fresh`."""
    noisy = np.clip(fresh + random.normal(0, 25, fresh.shape), 0, 255).astype(np.uint8)
    padded = np.pad(fresh.astype(float), ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    blurred = sum(padded[:, i : i + 28, j : j + 28] for i in range(3) for j in range(3)) / 9
    narrow = fresh[np.isin(labels, (0, 1, 2))]
    half = len(fresh) // 2
    return {
        "real, unseen": fresh,
        "real + noise of 25/255": noisy,
        "real, 3×3 blur": np.rint(blurred).astype(np.uint8),
        "real, 3 classes of 10": narrow,
        "half copies of training": np.concatenate([fresh[:half], train[:half]]),
        "copies of training": train[: len(fresh)],
        "uniform noise": random.integers(0, 256, fresh.shape, dtype=np.uint8),
    }


def main(
    images: Annotated[int, typer.Option(help="Of each of: training, hold-out, synthetic.")] = 5000,
    folder: Annotated[Path, typer.Option(help="Holds the four .gz files.")] = Path("/usr/share/datasets/fashion-mnist"),
    plots: Annotated[Path | None, typer.Option(help="Also write neighbours.png for the half copies.")] = None,
) -> None:
    pixels = read_idx(folder / "train-images-idx3-ubyte.gz")[..., None]
    labels = read_idx(folder / "train-labels-idx1-ubyte.gz").astype(np.int64)
    random = np.random.default_rng(0)
    parts = random.permutation(len(pixels))[: 3 * images].reshape(3, images)
    train, holdout, fresh = (pixels[np.sort(part)] for part in parts)
    start = time.perf_counter()
    extractor = embedded_extractor(drawn_set("glyphs", (1, 28, 28), 200), "glyphs")
    print(f"{extractor.name} drawn and trained in {time.perf_counter() - start:.0f} s, digest {extractor.digest[:8]}")
    train_features, holdout_features = extractor(train), extractor(holdout)
    table = Table(
        "set",
        *(name.replace("_", " ") for name in SHOWN),
        "s",
        title=f"{images} Fashion-MNIST images a side, against the hold-out, {extractor.name}",
    )
    for name, array in rows_of_known_quality(train, fresh, labels[np.sort(parts[2])], random).items():
        start = time.perf_counter()
        features = extractor(array)
        found = fidelity(
            name,
            features,
            holdout_features,
            (features, train_features, holdout_features),
            extractor,
            Evaluate().metrics,
            print,
        )
        table.add_row(name, *(f"{found[key]:.3g}" for key in SHOWN), f"{time.perf_counter() - start:.0f}")
        if plots and name.startswith("half"):
            labelled = np.concatenate(
                [labels[np.sort(parts[2])][: images // 2], labels[np.sort(parts[0])][: images // 2]]
            )
            synthetic, real = ImageSet(array, labelled, CLASSES), ImageSet(train, labels[np.sort(parts[0])], CLASSES)
            plot_neighbours(extractor, synthetic, real, plots / "neighbours.png")
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
