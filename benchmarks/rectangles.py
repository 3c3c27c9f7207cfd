r"""Measure teachers on full non-square pictures, and on squares.

A teacher is a linear classifier with differential privacy.

    OMP_NUM_THREADS=1 python benchmarks/rectangles.py FOLDER [--sizes 96x128,96x96,128x128pad]
        [--map patches] [--pattern '^(\d+)_'] [--epsilons 1,10] [--seeds 0,1,2]

FOLDER: public pictures in class folders, used as the sensitive ones. Several pictures may be copies
of one original. --pattern: regular expression for file names; its first group names the original.
Each seed holds out its own random fifth of the originals, with all their copies, and draws its own
noise. A size like 96x96 is the middle square of a picture; 128x128pad is the whole picture with
black bars. The directions of the features are fitted to drawn textures. The unit is one image. All
of ε goes to the teacher, and δ is 1/(N ln N). The full-batch steps are composed exactly. The table
has the balanced accuracy on the hold-out in %, and the processor seconds to compute the features of
a thousand pictures.
"""

import argparse
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from teacher_maps import HELD_OUT, InMemory, Known, balanced, total_mu
from torch import Tensor

from sfumato.data.sources import read_public, read_source
from sfumato.features.batch_invariant import rows_alone
from sfumato.features.projection import ProjectedFeatures, map_of
from sfumato.queries.teacher import query_teacher
from sfumato.settings.data import Data, Public
from sfumato.settings.queries import Teacher

DRAWN = 100  # Textures of each kind


def read(folder: str, size: str, pattern: str) -> tuple[Tensor, Tensor, np.ndarray]:
    """Load images, (N, 3, H, W) float32, their labels, and the index of each image's original."""
    sides = tuple(map(int, re.findall(r"\d+", size)))
    fit = "pad" if size.endswith("pad") else "crop"
    ways: dict[str, Any] = {"size": sides, "fit": fit}
    about = Data(source="imagefolder", path=folder, dataset_id="trial", channels=3, **ways)
    source = read_source(about, Path())
    originals = [re.search(pattern, file.name)[1] for file in source.files]  # type: ignore[index]
    images, labels = zip(*source.train, strict=True)
    stacked = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
    return stacked, torch.tensor(labels), np.unique(originals, return_inverse=True)[1]


def trained(
    rows: tuple[Tensor, Tensor],
    labels: Tensor,
    held_out: Tensor,
    settings: Teacher,
    epsilon: float,
    seed: int,
) -> float:
    """Train one teacher. Returns its balanced accuracy on the hold-out, in %.

    rows: outputs of the feature map for the images and for drawn textures.
    """
    private, public = (part[:, :, None, None] for part in rows)
    # The rows are already computed, so the shape is only a placeholder.
    features = ProjectedFeatures(settings.feature, (3, 8, 8), settings.dimension)
    features.map = Known(slice(0, private.shape[1]))
    spanned = features.fit(public, settings.power, seed).double()
    psi = torch.cat([features(part) for part in private.split(500)])
    size = int((~held_out).sum())
    sigma = math.sqrt(settings.steps) / total_mu(epsilon, 1 / (size * math.log(size)))
    charge: Any = InMemory(psi[~held_out], labels[~held_out], settings.steps, sigma, seed)
    covariance = spanned.T @ spanned / len(spanned)
    weights = query_teacher(
        charge, settings, int(labels.max()) + 1, float(size), covariance, lambda *_: None
    )
    return balanced((psi[held_out].double() @ weights).argmax(1), labels[held_out])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--sizes", default="96x128,96x96,128x128pad")
    parser.add_argument("--map", default="patches")
    parser.add_argument("--pattern", default=r"^(\d+)_")
    parser.add_argument("--epsilons", default="1,10")
    parser.add_argument("--seeds", default="0,1,2")
    arguments = parser.parse_args()
    print("| size | s per thousand | ε | accuracy by seed |\n|---|---|---|---|", flush=True)
    for size in arguments.sizes.split(","):
        images, labels, originals = read(arguments.folder, size, arguments.pattern)
        shape = (3, images.shape[2], images.shape[3])
        drawn, _ = zip(
            *read_public(Public(source="procedural", per_class=DRAWN), shape, Path(), 0).train,
            strict=True,
        )
        public = torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2).float() / 255
        began, seen = time.process_time(), map_of(arguments.map, shape, None)
        rows = rows_alone(seen, images), rows_alone(seen, public)
        seconds = 1000 * (time.process_time() - began) / (len(images) + len(public))
        for epsilon in map(float, arguments.epsilons.split(",")):
            settings = Teacher(feature=arguments.map, dimension=128)
            found = []
            for seed in map(int, arguments.seeds.split(",")):
                order = np.random.default_rng(seed).permutation(originals.max() + 1)
                held_out = torch.from_numpy(np.isin(originals, order[: len(order) // HELD_OUT]))
                found.append(trained(rows, labels, held_out, settings, epsilon, seed))
            print(
                f"| {size} | {seconds:.1f} | {epsilon:g} | "
                f"{', '.join(f'{one:.1f}' for one in found)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
