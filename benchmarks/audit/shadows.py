"""Attack releases of random halves of the digits: guess which images are inside, and their classes.

    OMP_NUM_THREADS=1 nice python benchmarks/audit/shadows.py [--epsilon 10] [--pairs 32]
        [--keep DIR]
    python benchmarks/audit/shadows.py --show

A fair coin for each image splits the digits into halves, and both halves are released (`dp-merf`
with a small generator). So every image is in exactly one release of each pair. To attack one pair,
the attacker uses all other pairs as shadows. A classifier, the student, is trained on each release.
DIR stores the releases and the students' predictions for all images. A stored release is not made
again. LiRA compares the student's confidence in an image's label with two means over the shadows:
over the releases that were made with the image, and over the others. RMIA compares it with the mean
over all shadows. An image's class is guessed in two ways: by the student, and by the nearest
released images.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

# folder of `csv_tables`, `patients` and `recipe_table`
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from csv_tables import csv_of
from patients import images_of
from recipe_table import ROOT, stage

from sfumato import load_release
from sfumato.evaluation.downstream import fit_classifier, schedule_of
from sfumato.runtime.compute import keep_freed_memory
from sfumato.training.supervised import logits

RESULTS = ROOT / "benchmarks" / "results"
DELTA = 1e-4
CLASSES = tuple(str(i) for i in range(10))
STUDENT, STEPS = "cnn", 100  # The student's classifier, and the number of its gradient steps
NEIGHBOURS = 5  # Released images that vote for a class
FALSE_ALARMS = 0.01
STAGES = (
    "prepare sensitive",
    "prepare public",
    "plan",
    "count",
    "frequency",
    "auxiliary",
    "synthesize",
)


def coins(pair: int, count: int) -> np.ndarray:
    """Draw which images are in the first release of a pair: (count,) bool.

    The second release has all other images.
    """
    return np.random.default_rng(pair).random(count) < 0.5


def params_of(epsilon: float) -> dict:
    return {
        "recipe": "dp-merf",
        "run": ["count", "frequency", "auxiliary", "synthesize"],
        "profile": None,
        "data": {"dataset_id": "half", "source": "npz", "path": "set.npz", "holdout_fraction": 0.0},
        "privacy": {"epsilon": epsilon, "delta": DELTA, "size_hint": 900},
        "count": {"noise": "2%"},
        "frequency": {"size": 2000},
        "auxiliary": {"steps": 300, "images": 2000, "batch": 100, "width": 24},
        "synthesize": {"count": 2000},
    }


def make(
    images: np.ndarray, labels: np.ndarray, inside: np.ndarray, epsilon: float, file: Path
) -> None:
    """Release the images that `inside` marks, and write {"images", "labels", "logits"}.

    The logits, (N, classes), are the student's for all images, inside or not.
    """
    home, work = Path.cwd(), Path(tempfile.mkdtemp(prefix="shadow-"))
    os.environ["SFUMATO_STATE"] = str(work / "state")
    np.savez(
        work / "set.npz", images=images[inside], labels=labels[inside], classes=np.array(CLASSES)
    )
    (work / "params.yaml").write_text(yaml.safe_dump(params_of(epsilon)))
    (work / "pipelines").symlink_to(ROOT / "pipelines")
    os.chdir(work)
    try:
        for command in STAGES:
            stage(*command.split())
        release = load_release(work / "artifacts" / "synthesize")
        released, given = np.array(release.images), np.array(release.labels)
        schedule = schedule_of(STUDENT, len(released), 1, STEPS)
        student = fit_classifier(STUDENT, released, given, len(CLASSES), schedule, seed=0)
        unfinished = file.with_suffix(".part.npz")
        np.savez_compressed(
            unfinished, images=released, labels=given, logits=logits(student, images[..., None])
        )
        unfinished.rename(file)
    finally:
        os.chdir(home)
        shutil.rmtree(work)


def confidences(found: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Compute log p/(1 − p) of each image's own label, (N,), from (N, classes) logits."""
    own = found[np.arange(len(labels)), labels]
    others = np.where(np.arange(found.shape[1]) == labels[:, None], -np.inf, found)
    return np.asarray(own - np.logaddexp.reduce(others, axis=1))


def lira(scores: np.ndarray, inside: np.ndarray, pair: int) -> np.ndarray:
    """Compute (2, N) log ratios: how much likelier a score is if its image is inside than if not.

    scores: (pairs, 2, N), score of each image in both releases of each pair;
    inside: (pairs, 2, N) bool, whether the image is in the release;
    pair: the attacked pair.

    The other pairs are the shadows. For each image, they give two mean scores: over the releases
    with the image, and over the releases without it. All images share one variance, because there
    are few shadows.
    Source: Carlini et al. 2022.
    """
    rest = np.arange(len(scores)) != pair
    shadows, known = (
        scores[rest].reshape(-1, scores.shape[2]),
        inside[rest].reshape(-1, scores.shape[2]),
    )
    means = [np.where(part, shadows, 0).sum(0) / part.sum(0) for part in (known, ~known)]
    variance = np.square(shadows - np.where(known, means[0], means[1])).mean()
    return np.asarray(
        ((scores[pair] - means[1]) ** 2 - (scores[pair] - means[0]) ** 2) / (2 * variance)
    )


def rmia(scores: np.ndarray, pair: int) -> np.ndarray:
    """Compute the log ratio of two probabilities of each image's label, (2, N).

    The first probability is from the student of the attacked release. The second is the mean over
    the students of all shadows. The arguments are as in `lira`. With the paper's threshold γ = 1,
    RMIA ranks the images of one release by this ratio.
    Source: Zarifzadeh, Liu and Shokri 2024.
    """
    chance = 1 / (1 + np.exp(-scores))
    rest = np.arange(len(scores)) != pair
    return np.asarray(np.log(chance[pair]) - np.log(chance[rest].mean(axis=(0, 1))))


def strength(found: np.ndarray, inside: np.ndarray) -> tuple[float, float]:
    """Return a score's AUC, and the share of members found at the false-alarm rate FALSE_ALARMS."""
    from sklearn.metrics import roc_auc_score

    limit = np.quantile(found[~inside], 1 - FALSE_ALARMS)
    return float(roc_auc_score(inside, found)), float((found[inside] > limit).mean())


def most_hits(false_alarms: np.ndarray, epsilon: float) -> np.ndarray:
    """Return the largest share of members that any attack can find at each rate of false alarms.

    The attacked release is (ε, δ)-private.
    """
    few = math.exp(epsilon) * false_alarms + DELTA
    many = 1 - math.exp(-epsilon) * (1 - false_alarms - DELTA)
    return np.minimum(np.minimum(few, many), 1.0)


def most_advantage(epsilon: float) -> float:
    """Bound how much one image can change the probability of any event (total variation)."""
    return (math.exp(epsilon) - 1 + 2 * DELTA) / (math.exp(epsilon) + 1)


def nearest_class(released: np.ndarray, given: np.ndarray, images: np.ndarray) -> np.ndarray:
    from sklearn.neighbors import KNeighborsClassifier

    model = KNeighborsClassifier(NEIGHBOURS).fit(
        released.reshape(len(released), -1).astype(float), given
    )
    return np.asarray(model.predict(images.reshape(len(images), -1).astype(float)))


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean over pairs and its standard error. values: one for each pair of releases."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))


def attacked(
    folder: Path, epsilon: float, images: np.ndarray, labels: np.ndarray
) -> tuple[list[dict], list[dict]]:
    """Attack the complete pairs in the folder.

    Returns two tables: one row per attack on membership, and one row per way to guess classes.
    """
    kept = [
        pair
        for pair in range(1000)
        if all((folder / f"{pair}-{side}.npz").exists() for side in (0, 1))
    ]
    files = [[dict(np.load(folder / f"{pair}-{side}.npz")) for side in (0, 1)] for pair in kept]
    first = np.array([coins(pair, len(labels)) for pair in kept])
    inside = np.stack([first, ~first], axis=1)  # (pairs, 2, N)
    scores = np.array([[confidences(file["logits"], labels) for file in pair] for pair in files])
    about: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": DELTA,
        "releases": 2 * len(kept),
        "images": len(labels),
    }
    grid = np.linspace(0, 1, 100_001)
    allowed = {"auc allowed": float(np.trapezoid(most_hits(grid, epsilon), grid))}
    allowed |= {"hits allowed": float(most_hits(np.array([FALSE_ALARMS]), epsilon)[0])}
    members = []
    ways = {"LiRA": lambda i: lira(scores, inside, i), "RMIA": lambda i: rmia(scores, i)}
    for name, way in {**ways, "confidence alone": lambda i: scores[i]}.items():
        each = [
            np.mean(
                [strength(one, own) for one, own in zip(way(i), inside[i], strict=True)], axis=0
            )
            for i in range(len(kept))
        ]
        auc, hits = (mean_and_error([row[column] for row in each]) for column in (0, 1))
        found = {"auc": auc[0], "auc error": auc[1], "hits": hits[0], "hits error": hits[1]}
        members.append(about | {"attack": name} | found | allowed)
    classes = []
    guesses = {
        "student": lambda file: file["logits"].argmax(axis=1),
        "nearest released": lambda file: nearest_class(file["images"], file["labels"], images),
    }
    for name, guess in guesses.items():
        # (pairs, 2, N)
        right = np.array([[guess(file) == labels for file in pair] for pair in files])
        shares = [
            (part[own].mean(), part[~own].mean()) for part, own in zip(right, inside, strict=True)
        ]
        more, error = mean_and_error([with_it - without for with_it, without in shares])
        found = {
            "right inside": np.mean(shares, axis=0)[0],
            "right outside": np.mean(shares, axis=0)[1],
        }
        found |= {
            "advantage": more,
            "advantage error": error,
            "advantage allowed": most_advantage(epsilon),
        }
        classes.append(about | {"guess": name} | found)
    return members, classes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epsilon", type=float, default=10.0)
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--keep", type=Path, default=Path("evaluation/shadows"))
    parser.add_argument(
        "--show",
        action="store_true",
        help="make no releases: attack the stored ones, and write the tables",
    )
    arguments = parser.parse_args()
    keep_freed_memory()
    keep = arguments.keep.resolve()
    images, labels = images_of("digits")
    folder = keep / f"{arguments.epsilon:g}"
    folder.mkdir(parents=True, exist_ok=True)
    for pair in [] if arguments.show else range(arguments.pairs):
        for side in (0, 1):
            file = folder / f"{pair}-{side}.npz"
            if not file.exists():
                make(images, labels, coins(pair, len(labels)) ^ bool(side), arguments.epsilon, file)
                print(file, flush=True)
    tables: tuple[list[dict], list[dict]] = ([], [])
    for one in sorted(keep.iterdir(), key=lambda path: float(path.name)):
        for table, rows in zip(tables, attacked(one, float(one.name), images, labels), strict=True):
            table += rows
    for table, name in zip(tables, ("shadows.csv", "attributes.csv"), strict=True):
        found = pd.DataFrame(table).round(5)
        (RESULTS / name).write_text(csv_of(found))
        print(found.to_string(index=False))


if __name__ == "__main__":
    main()
