"""Compare a teacher's accuracy under exact composition and under Rényi bounds.

    OMP_NUM_THREADS=1 python benchmarks/composition.py [--sets fashion-mnist,CIFAR]
        [--epsilons 1] [--seeds 0,1,2,3]

CIFAR: a folder of CIFAR-10's training images, with one folder per class. For each set, ε and seed,
two teachers are trained. One has the recipe's noise multipliers under `privacy.accountant: rdp`,
the other the multipliers under `exact`. Both use the same draws of noise. The directions of the
features are fitted to the hold-out. A real release may not use the hold-out, so its accuracy would
be lower than both accuracies here. The two can still be compared. Accuracies are measured on the
hold-out, in %.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from teacher_maps import InMemory
from torch import Tensor

from sfumato.data.sources import read_source
from sfumato.features.batch_invariant import rows_alone
from sfumato.features.projection import ProjectedFeatures
from sfumato.planning.resolve import noise_requests
from sfumato.privacy.accountant import calibrate, default_delta
from sfumato.queries.teacher import query_teacher
from sfumato.settings.params import Params
from sfumato.settings.recipes import params_of

FASHION = {"recipe": "teacher-generator", "profile": "fashion-mnist-cpu"}
PATCHES = {"feature": "patches", "flip": True, "dimension": 2048}
# Number of images of CIFAR-10 to hold out. For Fashion-MNIST, the test split is the hold-out
HELD_OUT = 10_000


def photographs(folder: str) -> dict[str, Any]:
    """Return settings for 40 000 photographs, as in command L of benchmarks/notes/rows.md."""
    data = {
        "source": "imagefolder",
        "path": folder,
        "dataset_id": "trial",
        "size": 32,
        "channels": 3,
    }
    privacy = {"size_hint": 40_000, "lifetime_epsilon": "unlimited"}
    recipe = {"recipe": "teacher-gaussian", "profile": "cifar10-cpu"}
    return recipe | {"data": data, "privacy": privacy, "teacher": PATCHES}


def at(content: dict[str, Any], epsilon: float, accountant: str) -> tuple[Params, dict[str, float]]:
    """Return the parameters with this ε and accountant, and the noise multiplier of each query."""
    privacy = content.get("privacy", {}) | {"epsilon": epsilon, "accountant": accountant}
    params = params_of(content | {"privacy": privacy}, Path("params.yaml"))
    delta = default_delta(params.privacy.size)
    mechanisms = calibrate(noise_requests(params), epsilon, delta, accountant)
    return params, {name: mechanism.noise_multiplier for name, mechanism in mechanisms.items()}


def pictures(params: Params) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Load images, (N, C, H, W) uint8, and labels, first for training, then of the hold-out."""
    source = read_source(params.data, Path("data/raw"))
    train = list(source.train)
    test = list(source.test or ())
    if not test:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
        test, train = [train[i] for i in order[:HELD_OUT]], [train[i] for i in order[HELD_OUT:]]
    parts = []
    for examples in (train, test):
        parts.append(
            torch.from_numpy(np.stack([image for image, _ in examples])).permute(0, 3, 1, 2)
        )
        parts.append(torch.tensor([int(label) for _, label in examples]))
    return tuple(parts)  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", default="fashion-mnist")
    parser.add_argument("--epsilons", default="1")
    parser.add_argument("--seeds", default="0,1,2,3")
    arguments = parser.parse_args()
    for name in arguments.sets.split(","):
        content = FASHION if name == "fashion-mnist" else photographs(name)
        params, _ = at(content, 1.0, "exact")
        images, labels, held_out, right = pictures(params)
        settings = params.teacher
        features = ProjectedFeatures(
            settings.feature, (*images.shape[1:],), settings.dimension, flip=settings.flip
        )
        spanned = features.fit(held_out, settings.power, 0).double()
        covariance = spanned.T @ spanned / len(spanned)
        rows = torch.cat([rows_alone(features, part.float() / 255) for part in images.split(1000)])
        for epsilon in map(float, arguments.epsilons.split(",")):
            accuracies: dict[str, list[float]] = {}
            noise = {}
            for accountant in ("rdp", "exact"):
                params, multipliers = at(content, epsilon, accountant)
                noise[accountant] = multipliers
                for seed in map(int, arguments.seeds.split(",")):
                    charge: Any = InMemory(
                        rows, labels, params.teacher.steps, multipliers["teacher"], seed
                    )
                    size = float(params.privacy.size)
                    weights = query_teacher(
                        charge, params.teacher, 10, size, covariance, lambda *_: None
                    )
                    hits = (spanned @ weights).argmax(1) == right
                    accuracies.setdefault(accountant, []).append(100 * float(hits.double().mean()))
            gains = [b - a for a, b in zip(accuracies["rdp"], accuracies["exact"], strict=True)]
            shown = ", ".join(
                f"{key} {noise['rdp'][key]:g} → {noise['exact'][key]:g}" for key in noise["rdp"]
            )
            means = " → ".join(f"{fmean(found):.2f}" for found in accuracies.values())
            print(f"{name}, ε = {epsilon:g}, rdp → exact: noise {shown}; teacher {means}", end="; ")
            print(
                f"gain {fmean(gains):.2f} ± {stdev(gains):.2f} over {len(gains)} draws of noise",
                flush=True,
            )


if __name__ == "__main__":
    main()
