"""Measure teachers (linear classifiers with differential privacy) on one or several feature maps.

    OMP_NUM_THREADS=1 python benchmarks/teacher_maps.py FOLDER PUBLIC [--rows FILE]
        [--maps patches,imagenet] [--epsilons 1,10] [--seeds 0,1] [--side 128] [--units 500]
        [--set dimension=128 ...]

No project is needed. FOLDER: public images in class folders, used as the sensitive ones. PUBLIC:
images to which the directions of the features are fitted. It is a folder, or `procedural` for drawn
textures, or `itself` for the hold-out. No release may use its hold-out, so `itself` only serves to
estimate the largest gain from better directions. Each seed holds out its own random fifth of the
images and draws its own noise. All of ε goes to the teacher, and δ is 1/(N ln N). The full-batch
steps are composed exactly. The accuracy is balanced, on the hold-out, in %. The outputs of the maps
are computed once and stored in the file --rows. --units: number of random images to train on, with
the settings that `stage init` chooses for this number; without it, all images are used.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.data.sources import read_public, read_source
from sfumato.features.batch_invariant import rows_alone
from sfumato.features.projection import ProjectedFeatures, map_of
from sfumato.planning.proposal import at_effective_epsilon
from sfumato.privacy.rows import bounded_sum
from sfumato.queries.teacher import query_teacher
from sfumato.settings.data import Data, Public
from sfumato.settings.queries import Teacher, TeacherMap

DRAWN, HELD_OUT = 400, 5  # Textures of each kind; one image in 5 is held out


class Known(nn.Module):
    """A stand-in for a feature map, with rows that are already computed.

    Its input, (B, Σ d, 1, 2), takes the place of images. It contains the rows of all maps: in the
    first column for each image, in the second column for its mirror image. So a flip of this input
    exchanges an image and its mirror image. The output is the part of the first column that belongs
    to this map.
    """

    def __init__(self, columns: slice) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, images: Tensor) -> Tensor:
        return images[:, self.columns, 0, 0]


class InMemory:
    """A stand-in for a charge, on rows in memory. Its noise is predictable: it protects nothing."""

    def __init__(self, rows: Tensor, labels: Tensor, uses: int, sigma: float, seed: int) -> None:
        self.rows, self.labels, self.uses, self.sigma = rows, labels, uses, sigma
        self.random = torch.Generator().manual_seed(seed)

    def sum(self, rows_of, max_norm: float, *, size: int) -> Tensor:
        total = bounded_sum(rows_of(self.rows, self.labels), max_norm)
        return total + self.sigma * max_norm * torch.randn(
            total.shape, generator=self.random, dtype=total.dtype
        )


def total_mu(epsilon: float, delta: float) -> float:
    """Find the largest μ for which a Gaussian mechanism is (ε, δ)-private, by bisection.

    Source: Balle and Wang 2018.
    """
    cdf, low, high = NormalDist().cdf, 1e-4, 50.0
    for _ in range(100):
        mu = (low + high) / 2
        spent = cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * cdf(-epsilon / mu - mu / 2)
        low, high = (mu, high) if spent < delta else (low, mu)
    return low


def read_images(folder: str, public: bool, side: int) -> tuple[Tensor, Tensor]:
    """Load grey images, (N, 1, side, side) uint8, and their labels."""
    if not public:
        source = read_source(
            Data(source="imagefolder", path=folder, dataset_id="trial", size=side, channels=1),
            Path(),
        )
    elif folder == "procedural":
        source = read_public(Public(source=folder, per_class=DRAWN), (1, side, side), Path(), 0)
    else:
        about = Public(source="imagefolder", path=folder, declared_public=True)
        source = read_public(about, (1, side, side), Path(), 0)
    examples = [*source.train, *(source.test or ())]
    images = torch.from_numpy(np.stack([image for image, _ in examples])).permute(0, 3, 1, 2)
    return images, torch.tensor([int(label) for _, label in examples])


def made_rows(names: list[str], images: Tensor) -> dict[str, np.ndarray]:
    """Compute the rows of images and of their mirror images, by map: (N, d, 2) float32."""
    shape = (1, *images.shape[2:])
    shown = images.float() / 255
    made = {}
    for name in names:
        rows_of = map_of(name, shape, None)
        made[name] = torch.stack(
            [rows_alone(rows_of, seen) for seen in (shown, shown.flip(3))], dim=2
        ).numpy()
    return made


def kept_rows(arguments: argparse.Namespace, names: list[str]) -> dict[str, np.ndarray]:
    """Load the stored rows, or compute and store them.

    The keys are `private.<map>`, `public.<map>` and `labels`.
    """
    file = Path(arguments.rows)
    if file.is_file():
        return dict(np.load(file))
    images, labels = read_images(arguments.folder, False, arguments.side)
    found = {f"private.{name}": rows for name, rows in made_rows(names, images).items()} | {
        "labels": labels.numpy()
    }
    if arguments.public != "itself":
        public, _ = read_images(arguments.public, True, arguments.side)
        found |= {f"public.{name}": rows for name, rows in made_rows(names, public).items()}
    np.savez(file, **found)  # type: ignore[arg-type]
    return found


def balanced(predicted: Tensor, labels: Tensor) -> float:
    rates = [(predicted[labels == label] == label).double().mean() for label in labels.unique()]
    return 100 * float(torch.stack(rates).mean())


def trained(
    settings: Teacher, rows: dict[str, np.ndarray], epsilon: float, seed: int, units: int, side: int
) -> float:
    """Train one teacher. Returns its balanced accuracy on the hold-out, in %.

    units: number of images to train on, from those not held out; 0 for all.
    """
    names, labels = [part.map for part in settings.maps], torch.from_numpy(rows["labels"])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out, kept = (
        order[: len(labels) // HELD_OUT],
        order[len(labels) // HELD_OUT :][: units or None],
    )
    private = torch.cat([torch.from_numpy(rows[f"private.{name}"]) for name in names], dim=1)[
        :, :, None
    ]
    public = private[held_out]
    if f"public.{names[0]}" in rows:
        public = torch.cat([torch.from_numpy(rows[f"public.{name}"]) for name in names], dim=1)[
            :, :, None
        ]
    edges = np.cumsum([0, *(rows[f"private.{name}"].shape[1] for name in names)])
    about = settings.features or settings.feature, (1, side, side), settings.dimension
    features = ProjectedFeatures(*about, flip=settings.flip)
    parts = [Known(slice(int(start), int(end))) for start, end in itertools.pairwise(edges)]
    if len(parts) > 1:
        features.map.maps = nn.ModuleList(parts)
    else:
        features.map = parts[0]
    spanned = features.fit(public, settings.power, seed).double()
    psi = torch.cat([features(part) for part in private.split(500)])
    size = len(kept)
    sigma = math.sqrt(settings.steps) / total_mu(epsilon, 1 / (size * math.log(size)))
    charge: Any = InMemory(psi[kept], labels[kept], settings.steps, sigma, seed)
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
    parser.add_argument("public")
    parser.add_argument("--rows", default="rows.npz")
    parser.add_argument("--maps", default="patches,imagenet")
    parser.add_argument("--epsilons", default="1,10")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--units", type=int, default=0)
    parser.add_argument("--constants", default="auxiliary", choices=["public", "auxiliary"])
    parser.add_argument(
        "--set", action="append", default=[], help="a setting of `teacher`, such as dimension=128"
    )
    arguments = parser.parse_args()
    names = arguments.maps.split(",")
    rows = kept_rows(arguments, names)
    ways = [[name] for name in names] + ([names] if len(names) > 1 else [])
    for epsilon in map(float, arguments.epsilons.split(",")):
        for maps in ways:
            given = dict(pair.split("=") for pair in arguments.set)
            about = Teacher.constants(arguments.constants, epsilon)
            if arguments.units:
                effective = epsilon * arguments.units / 60_000
                about |= at_effective_epsilon("teacher-generator", effective)["teacher"] | {
                    "ridge": 0.01
                }
            about |= {key: float(value) for key, value in given.items()}
            settings = Teacher.model_validate(
                {"features": [TeacherMap(map=name) for name in maps], **about}
            )
            few = arguments.units, arguments.side
            found = [
                trained(settings, rows, epsilon, seed, *few)
                for seed in map(int, arguments.seeds.split(","))
            ]
            shown = ", ".join(f"{one:.1f}" for one in found)
            print(
                f"ε = {epsilon:g}, {' and '.join(maps)}, {settings.dimension} directions: accuracy "
                f"by seed in %: {shown}",
                flush=True,
            )


if __name__ == "__main__":
    main()
