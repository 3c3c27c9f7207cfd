"""Compare releases of several image sizes, all enlarged to the largest size.

    OMP_NUM_THREADS=1 python benchmarks/sizes.py PROJECT=STATE [PROJECT=STATE ...]
        [--steps 600] [--picture F]

All projects must come from `stage init` on the same folder, with the same key (the file
keys/DATASET in each state directory), so that all have the same hold-out. The first project must
have the largest images; smaller images are enlarged to its size (bicubic). The program trains a
`cnn` on each release and on real images, always for the same number of steps, and prints the
accuracy of each `cnn` in %. It also prints the Fréchet distance of plain images to real ones, in
the features of a network trained on drawn glyphs. The results are local, because they are measured
on real images. With `--picture`, the program only draws plain images: one project per row, three
images of each class.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from sfumato import load_release
from sfumato.data.images import ImageSet, as_floats, as_uint8
from sfumato.data.store import load_prepared, read_card
from sfumato.evaluation.downstream import evaluate_classifier, schedule_of
from sfumato.evaluation.extractors import build_extractor
from sfumato.evaluation.metrics.distances import frechet_distance
from sfumato.evaluation.scores import subsample
from sfumato.settings.evaluate import Evaluate
from sfumato.storage.png import save_png, to_grid

COMPARED = 4000  # Largest number of images of each set in a distance
SHOWN = 3  # Images of each class in a picture


def enlarged(image_set: ImageSet, side: int) -> ImageSet:
    """Enlarge the images to (N, side, side, C) uint8."""
    if image_set.shape[2] == side:
        return image_set
    parts = []
    for rows in np.array_split(np.arange(len(image_set)), -(-len(image_set) // 500)):
        images = torch.from_numpy(np.array(image_set.images[rows])).permute(0, 3, 1, 2)
        larger = F.interpolate(
            as_floats(images), size=(side, side), mode="bicubic", align_corners=False
        )
        parts.append(as_uint8(larger))
    return ImageSet(np.concatenate(parts), image_set.labels, image_set.classes)


def released(project: Path, kinds: list[str] | None = None) -> ImageSet:
    release = load_release(project / "artifacts" / "synthesize", kinds)
    return ImageSet(release.images, release.labels, tuple(release.classes))


def draw(projects: list[Path], side: int, file: Path) -> None:
    rows = []
    for project in projects:
        plain = released(project, ["plain"])
        chosen = [
            np.flatnonzero(plain.labels == label)[:SHOWN] for label in range(len(plain.classes))
        ]
        images = enlarged(plain.take(np.concatenate(chosen)), side).images
        rows.append(as_floats(torch.from_numpy(np.array(images)).permute(0, 3, 1, 2)))
    save_png(file, to_grid(torch.cat(rows), len(rows[0])))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("projects", nargs="+", metavar="PROJECT=STATE")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", default="0")
    parser.add_argument(
        "--no-real", action="store_true", help="do not train a network on real images"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    projects = dict(pair.split("=", 1) for pair in arguments.projects)
    first, state = next(iter(projects.items()))
    card = read_card(Path(first) / "data" / "sensitive" / "card.json")
    if arguments.picture:
        return draw([Path(project) for project in projects], card.shape[2], arguments.picture)
    train, holdout = (load_prepared(Path(state), card, part) for part in ("sensitive", "holdout"))
    side, seeds = card.shape[2], [int(seed) for seed in arguments.seeds.split(",")]

    def accuracy(image_set: ImageSet) -> str:
        schedule = schedule_of("cnn", len(image_set), 1, arguments.steps)
        found = [
            100 * evaluate_classifier("cnn", image_set, holdout, schedule, {}, seed).accuracy
            for seed in seeds
        ]
        return " ".join(f"{value:.1f}" for value in found)

    extractor = build_extractor(Evaluate(fidelity=("frechet",)), card.shape, lambda what: None)
    assert extractor is not None
    real = extractor(subsample(train, COMPARED).images)
    print(
        f"real hold-out: Fréchet {frechet_distance(extractor(holdout.images), real):.2f}",
        flush=True,
    )
    if not arguments.no_real:
        print(f"real images: accuracy {accuracy(train)}", flush=True)
    for project in map(Path, projects):
        plain = subsample(enlarged(released(project, ["plain"]), side), COMPARED)
        distance = frechet_distance(extractor(plain.images), real)
        whole = enlarged(released(project), side)
        print(f"{project.name}: Fréchet {distance:.2f}, accuracy {accuracy(whole)}", flush=True)


if __name__ == "__main__":
    main()
