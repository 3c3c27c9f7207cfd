"""Measure whether fitting the one-step generator for more steps ever makes its images worse.

    OMP_NUM_THREADS=1 python benchmarks/more_steps.py [--epsilons 0.5,1,3,10] [--rare 500,4000]
        [--factors 1,2,4] [--seeds 0,1,2]

The data are two classes of Fashion-MNIST (the Debian package dataset-fashion-mnist) at 14×14: 3 900
T-shirts, and as many shirts as --rare states. The features are released with `SHARE` of the budget,
as in recipe teacher-generator at ε = 1. The class counts are treated as known. A classifier is
trained on the generator's images, and tested on the test images of both classes. The table has the
classifier's balanced accuracy in %: mean and standard deviation over the seeds of noise, generator
and classifier. All data are public, so there is no journal.
"""

from __future__ import annotations

import argparse
import gzip
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.data.images import as_uint8
from sfumato.data.sources.idx import DEBIAN_FASHION_MNIST
from sfumato.evaluation.downstream import fit_classifier
from sfumato.features import FeatureMeans
from sfumato.features.fourier import FourierFeatures
from sfumato.generators.one_step import Target, drawing, fit_generator, new_generator
from sfumato.privacy.accountant import NoiseRequest, calibrate
from sfumato.settings.queries import FeatureMap
from sfumato.settings.training import Auxiliary
from sfumato.storage.png import save_png, to_grid
from sfumato.training.supervised import Schedule

CLASSES, COMMON = (0, 6), 3900
SHARE = 0.3  # Share of the budget for the features
FEATURES = (
    FeatureMap(map="deep-scattering", length_scales=(0.837, 0.418), weight=0.5),
    FeatureMap(map="pixels", length_scales=(0.366, 0.183), weight=0.5),
)
DRAWN, JUDGED = 3000, 300  # Training images and steps of the classifier


def read(part: str) -> tuple[Tensor, Tensor]:
    """Load the images of both classes, (N, 1, 14, 14) in [0, 1], and their labels, 0 or 1.

    part: "train" or "t10k".
    """
    files = [next(DEBIAN_FASHION_MNIST.glob(f"{part}-{name}*")) for name in ("images", "labels")]
    raw = [gzip.decompress(file.read_bytes()) for file in files]
    images = (
        torch.frombuffer(bytearray(raw[0][16:]), dtype=torch.uint8).view(-1, 1, 28, 28).float()
        / 255
    )
    labels = torch.frombuffer(bytearray(raw[1][8:]), dtype=torch.uint8)
    kept = torch.isin(labels, torch.tensor(CLASSES, dtype=torch.uint8))
    return F.avg_pool2d(images[kept], 2), (labels[kept] == CLASSES[1]).long()


def noise_multiplier(epsilon: float, size: int) -> float:
    asks = {
        "frequency": NoiseRequest(sample_rate=1.0, uses=1, share=SHARE),
        "rest": NoiseRequest(sample_rate=1.0, uses=1),
    }
    return calibrate(asks, epsilon, 1 / size)["frequency"].noise_multiplier


def balanced_accuracy(
    images: Tensor, labels: Tensor, test: tuple[Tensor, Tensor], seed: int
) -> float:
    """Train a `cnn` on the images, and return its balanced accuracy on `test` in %."""
    schedule = Schedule(steps=JUDGED, learning_rate=3e-3, weight_decay=1e-2)
    judge = fit_classifier("cnn", as_uint8(images), labels.numpy(), 2, schedule, seed=seed)
    with torch.no_grad():
        found = judge(test[0]).argmax(1) == test[1]
    return 100 * float(np.mean([found[test[1] == m].float().mean() for m in (0, 1)]))


def drawn_images(
    target: Tensor, features: FourierFeatures, priors: Tensor, steps: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Fit a generator to `target`, and draw images, (N, 1, 14, 14), and labels from it."""
    how = Auxiliary(steps=steps, batch=100, width=16)
    generator = new_generator((1, 14, 14), 2, how.latent, how.width, seed)
    fit_generator(generator, Target([FeatureMeans(target, features)]), how, priors, seed)
    parts, labels = drawing(generator, DRAWN, seed=seed)
    return torch.cat(list(parts)), labels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("epsilons", "0.5,1,3,10"),
        ("rare", "500,4000"),
        ("factors", "1,2,4"),
        ("seeds", "0,1,2"),
    ):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--size", type=int, default=3000)
    parser.add_argument(
        "--grids", type=Path, help="Folder for a PNG of each fit's images, by class."
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    train, test = read("train"), read("t10k")
    seeds = [int(seed) for seed in given.seeds.split(",")]
    embedders = {seed: FourierFeatures((1, 14, 14), FEATURES, given.size, seed) for seed in seeds}
    print(
        "| shirts | ε | steps | balanced accuracy | by seed | seconds |\n|---|---|---|---|---|---|"
    )
    for rare in map(int, given.rare.split(",")):
        rows = torch.cat([(train[1] == m).nonzero()[:n, 0] for m, n in ((0, COMMON), (1, rare))])
        images, labels, size = train[0][rows], train[1][rows], COMMON + rare
        real = torch.cat([(labels == m).nonzero()[:500, 0] for m in (0, 1)])
        print_row(
            rare,
            "real",
            "",
            [balanced_accuracy(images[real], labels[real], test, seed) for seed in seeds],
            0,
        )
        priors = torch.tensor([COMMON, rare]) / size
        with torch.no_grad():
            totals = {
                seed: embedders[seed].embed(images, F.one_hot(labels, 2).float()) for seed in seeds
            }
        for epsilon in map(float, given.epsilons.split(",")):
            scale = noise_multiplier(epsilon, size)
            for steps in (given.steps * int(factor) for factor in given.factors.split(",")):
                found, started = [], time.process_time()
                for seed in seeds:
                    random = torch.Generator().manual_seed(seed)
                    total = totals[seed] + scale * torch.randn(totals[seed].shape, generator=random)
                    drawn, asked = drawn_images(total / size, embedders[seed], priors, steps, seed)
                    found.append(balanced_accuracy(drawn, asked, test, seed))
                    if given.grids:
                        shown = torch.cat([drawn[asked == m][:40] for m in (0, 1)])
                        save_png(
                            given.grids / f"{rare}-{epsilon:g}-{steps}-{seed}.png",
                            to_grid(shown, 10),
                        )
                print_row(rare, f"{epsilon:g}", str(steps), found, time.process_time() - started)


def print_row(rare: int, epsilon: str, steps: str, found: list[float], seconds: float) -> None:
    each = ", ".join(f"{accuracy:.1f}" for accuracy in found)
    spread = f"{np.mean(found):.1f} ± {np.std(found):.1f}"
    print(f"| {rare} | {epsilon} | {steps} | {spread} | {each} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
