"""Check the measures of `evaluate` on image sets of known quality.

    python benchmarks/metrics_sanity.py [--images 5000] [--folder /usr/share/datasets/fashion-mnist]
        [--plots DIR]
    # drawn glyphs (digits and letters) replace real images
    python benchmarks/metrics_sanity.py --drawn
    # time of each measure
    python benchmarks/metrics_sanity.py --seconds 5000,60000
    # the pattern in pixels, with 40 pairs of students
    python benchmarks/metrics_sanity.py --marks 40

Each row of the tables is a set: unseen real images; the same images with noise, blurred, of three
classes only, or without one class; a set with one in a hundred, half, or all images copied from the
training images; blank images; images of another kind; uniform noise. A linear classifier is trained
on each set.
Above the tables, some measures of some sets are printed beside values that were computed in another
way: MIND, the disclosure test's p and bound on ε, the interval of the accuracy, the accuracy of the
worst class, and the calibration error.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from PIL import Image
from rich.console import Console
from rich.table import Table
from scipy.optimize import brentq
from scipy.stats import binom, binomtest
from sklearn.calibration import calibration_curve
from sklearn.datasets import load_digits
from sklearn.metrics import recall_score

from sfumato.data.images import ImageSet
from sfumato.data.rendered import drawn_set
from sfumato.data.sources.idx import read_idx
from sfumato.evaluation.disclosure import MISSED, disclosure
from sfumato.evaluation.downstream import (
    BINS,
    aggregate,
    bootstrap_interval,
    by_column,
    calibration_error,
    evaluate_classifier,
    fit_classifier,
    schedule_of,
    scored_by,
)
from sfumato.evaluation.extractors import Extractor, embedded_extractor
from sfumato.evaluation.metrics.fidelity import METRICS, chosen_metrics, fidelity
from sfumato.evaluation.metrics.neighbours import nearest_rows
from sfumato.evaluation.plots import plot_neighbours
from sfumato.evaluation.public_student import score_student, score_students
from sfumato.evaluation.scores import COMPARED, SEARCHED
from sfumato.release.pattern import FOUND, add_pattern, pattern_key, pattern_score
from sfumato.settings.evaluate import Evaluate
from sfumato.storage.png import png_bytes
from sfumato.training.supervised import logits

CLASSES = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
LOST = 3  # The class that is missing from one of the sets
SHUFFLES = 20_000
Student = Callable[[ImageSet, ImageSet, int], float]  # Training set, hold-out, seed -> accuracy


def sets_of_known_quality(
    train: ImageSet, fresh: ImageSet, other: ImageSet, random: np.random.Generator
) -> dict[str, ImageSet]:
    """Build sets of known quality, by name.

    train: training images; fresh: as many unseen images of the same kind; other: at least as many
    images of another kind.
    """
    unseen, labels = fresh.images, fresh.labels
    height, width = unseen.shape[1:3]
    padded = np.pad(unseen.astype(float), ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    blurred = sum(padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)) / 9
    noisy = np.clip(unseen + random.normal(0, 25, unseen.shape), 0, 255).astype(np.uint8)
    count = len(unseen)

    def copied(number: int) -> ImageSet:
        images = np.concatenate([train.images[:number], unseen[number:]])
        return ImageSet(
            images, np.concatenate([train.labels[:number], labels[number:]]), fresh.classes
        )

    def like(images: np.ndarray) -> ImageSet:
        return ImageSet(images, labels, fresh.classes)

    return {
        "real, unseen": fresh,
        "real + noise of 25/255": like(noisy),
        "real, 3×3 blur": like(np.rint(blurred).astype(np.uint8)),
        "real, 3 classes": fresh.take(np.flatnonzero(labels < LOST)),
        "real, one class lost": fresh.take(np.flatnonzero(labels != LOST)),
        "1 % copied from training": copied(count // 100),
        "half copied from training": copied(count // 2),
        "all copied from training": copied(count),
        "blanks": like(np.zeros_like(unseen)),
        "another set": like(other.images[:count]),
        "uniform noise": like(random.integers(0, 256, unseen.shape, dtype=np.uint8)),
    }


def real_images(drawn: bool, folder: Path, images: int) -> tuple[ImageSet, ImageSet]:
    """Load two sets in random order: 3 · `images` real images, and `images` of another kind."""
    letters = drawn_set("glyphs", (1, 28, 28), -(-3 * images // 26), seed=1)
    if drawn:
        other = drawn_set("glyphs", (1, 28, 28), -(-images // 26), seed=2)
        upside_down = ImageSet(255 - other.images[:, ::-1], other.labels, other.classes)
        return shuffled(letters, 3 * images), shuffled(upside_down, images)
    pixels = read_idx(folder / "train-images-idx3-ubyte.gz")[..., None]
    labels = read_idx(folder / "train-labels-idx1-ubyte.gz").astype(np.int64)
    return shuffled(ImageSet(pixels, labels, CLASSES), 3 * images), shuffled(letters, images)


def shuffled(image_set: ImageSet, count: int) -> ImageSet:
    return image_set.take(np.random.default_rng(0).permutation(len(image_set))[:count])


def sliced_by_torch(a: np.ndarray, b: np.ndarray) -> float:
    """Compute MIND in another way: in float32, in other directions, and with equally many rows of
    both sets.
    """
    random = torch.Generator().manual_seed(99)
    axes = torch.nn.functional.normalize(torch.randn(1000, a.shape[1], generator=random), dim=1)
    count = min(len(a), len(b))
    one, two = (torch.from_numpy(part[:count]).float() @ axes.T for part in (a, b))
    return float((one.sort(dim=0).values - two.sort(dim=0).values).pow(2).mean().sqrt())


def p_by_shuffling(
    near: np.ndarray, strangers: np.ndarray, rank: int, random: np.random.Generator
) -> float:
    """Estimate p by shuffling the distances of training images and hold-out images (strangers).

    The test counts the training images that are nearer to the set than a limit. Returns the share
    of shuffles in which this count is at least as large as without shuffling.

    near: distance of each training image to the nearest image of the set;
    strangers: the same for each hold-out image;
    rank: the limit is the distance of the rank-th nearest stranger, counted from 1.
    """
    distances = np.concatenate([near, strangers])
    seen = (near < np.sort(strangers)[rank - 1]).sum()
    hits = 0
    for _ in range(SHUFFLES):
        dealt = random.permutation(distances)
        limit = np.partition(dealt[len(near) :], rank - 1)[rank - 1]
        hits += (dealt[: len(near)] < limit).sum() >= seen
    return hits / SHUFFLES


def epsilon_by_tails(near: np.ndarray, strangers: np.ndarray) -> float:
    """Compute the lower bound on ε in another way: invert the binomial tails by root finding.

    near, strangers: see `p_by_shuffling`.
    """
    ranks = sorted({1, -(-len(strangers) // 100)})
    units, found = len(near), [0.0]
    usual = brentq(
        lambda share: binom.cdf(units, units + len(strangers), share) - MISSED, 1e-9, 1 - 1e-9
    )
    for rank in ranks:
        seen = int((near < np.sort(strangers)[rank - 1]).sum())
        if seen:
            drawn, limit = seen + rank - 1, MISSED / len(ranks)
            share = brentq(
                lambda p, k=seen, n=drawn, most=limit: binom.sf(k - 1, n, p) - most, 1e-9, 1 - 1e-9
            )
            found.append(float(np.log(share / (1 - share)) - np.log(usual / (1 - usual))))
    return max(found)


def reliability_by_scikit_learn(
    scores: np.ndarray, labels: np.ndarray
) -> tuple[float, float, float, float]:
    """Compute Wilson's interval, worst class accuracy and calibration error by other libraries."""
    predicted, sure = (
        scores.argmax(axis=1),
        torch.softmax(torch.from_numpy(scores).double(), dim=1).max(dim=1).values,
    )
    right = predicted == labels
    interval = binomtest(int(right.sum()), len(labels)).proportion_ci(0.95, "wilson")
    worst = recall_score(
        labels, predicted, labels=np.unique(labels), average=None, zero_division=0
    ).min()
    shares, means = calibration_curve(right, sure.numpy(), n_bins=BINS)
    sizes = np.histogram(sure.numpy(), bins=np.linspace(0, 1, BINS + 1))[0]
    error = (np.abs(shares - means) * sizes[sizes > 0]).sum() / len(labels)
    return interval.low, interval.high, float(worst), float(error)


def judged(part: ImageSet, holdout: ImageSet) -> tuple[np.ndarray, dict]:
    """Train a linear classifier on a set, and test it on the hold-out.

    Returns the logits of the hold-out images, and the result of `aggregate`.
    """
    schedule = schedule_of("lr", len(part), 1)
    scores = logits(
        fit_classifier("lr", part.images, part.labels, len(part.classes), schedule, 0),
        holdout.images,
    )
    return scores, aggregate([scored_by(lambda _: scores, holdout, {})], part.classes)


def groups_of_known_accuracy() -> None:
    """Print `by_column` for groups of 400, 200, 6 and 5 images, with 80, 50, 100 and 100 % right.

    The output also has intervals by the normal approximation. The groups of 6 and 5 are merged into
    "others", because groups of fewer than 10 images are too small.
    """
    parts = {"a": (400, 0.8), "b": (200, 0.5), "c": (6, 1.0), "d": (5, 1.0)}
    right = np.concatenate(
        [np.arange(count) < count * share for count, share in parts.values()]
    ).astype(float)
    column = by_column(right, None, np.repeat([*parts], [count for count, _ in parts.values()]))
    for row in column["groups"]:
        error = 1.96 * np.sqrt(row["mean"] * (1 - row["mean"]) / row["images"])
        low, high = row["interval"]
        normal = f"{row['mean'] - error:.3f} to {row['mean'] + error:.3f}"
        print(
            f"{row['group']}: {row['images']} images, {row['mean']:.3f}, {low:.3f} to {high:.3f} "
            f"(normal: {normal})"
        )
    print(f"best minus worst group {column['gap']:.3f}, images withheld {column['withheld']}")


def seconds_of_measures(sizes: list[int]) -> None:
    """Print the CPU seconds of each measure, for released, training and hold-out sets of each size.

    The images are noise, and their features are 128 of their pixels, so that no network is timed.
    As in `evaluate`, large sets are subsampled: the disclosure test does so itself, and the other
    measures use at most COMPARED released and hold-out images, and SEARCHED training images.
    """
    random = np.random.default_rng(0)
    for size in sizes:
        labels = np.arange(size) % len(CLASSES)
        drawn = (random.integers(0, 256, (size, 28, 28, 1), dtype=np.uint8) for _ in range(3))
        for name, job in jobs(*(ImageSet(images, labels, CLASSES) for images in drawn)).items():
            start = time.process_time()
            job()
            print(f"{size} images, {name}: {time.process_time() - start:.1f} s", flush=True)


def jobs(own: ImageSet, train: ImageSet, holdout: ImageSet) -> dict[str, Callable[[], object]]:
    """Return the functions to time, by name."""
    extractor = Extractor(
        name="128 pixels", digest="", embed=lambda images: images.flatten(1)[:, :128]
    )
    compared, reference = (extractor(part.images[:COMPARED]) for part in (own, holdout))
    novel = compared, extractor(train.images[:SEARCHED]), reference
    right = own.labels == 0

    def metric(name: str) -> Callable[[], object]:
        return lambda: fidelity(
            "timed", compared, reference, novel, extractor, [name], lambda _: None
        )

    return {
        "disclosure": lambda: disclosure(own, train, holdout, extractor),
        "interval": lambda: bootstrap_interval(right),
        "interval by a column with 10 values": lambda: by_column(
            right, None, np.array(CLASSES)[own.labels]
        ),
        "calibration": lambda: calibration_error(
            own.images.reshape(len(own), -1)[:, :10], own.labels
        ),
        "second student": lambda: score_student(
            extractor, own.take(np.arange(len(compared))), holdout, 0
        ),
        **{name: metric(name) for name, one in METRICS.items() if one.measure and not one.needs},
    }


def after_jpeg(images: np.ndarray) -> np.ndarray:
    """Save (N, H, W, C) uint8 images as PNG and then as JPEG of quality 90, and read them back."""
    pictures = []
    for image in images:
        content = io.BytesIO()
        with Image.open(io.BytesIO(png_bytes(image))) as picture:
            picture.save(content, format="JPEG", quality=90)
        with Image.open(content) as picture:
            pictures.append(np.atleast_3d(np.asarray(picture)))
    return np.stack(pictures)


def rates_of_marks(images: np.ndarray, draws: int = 2000) -> None:
    """Print how often the pattern is found after JPEG, in marked sets and in unmarked sets."""
    key, random = pattern_key("sanity", 0), np.random.default_rng(0)
    for side, sizes in ((28, (1, 4, 10)), (64, (1, 4)), (128, (1,))):
        larger = [
            Image.fromarray(image[..., 0]).resize((side, side), Image.Resampling.LANCZOS)
            for image in images
        ]
        drawn = np.stack([np.asarray(picture) for picture in larger])[..., None]
        marked, plain = after_jpeg(add_pattern(drawn, key)), after_jpeg(drawn)
        for size in sizes:
            sets = [random.permutation(len(images))[:size] for _ in range(draws)]
            hits = np.mean([pattern_score(marked[rows], key) >= FOUND for rows in sets])
            alarms = [
                pattern_score(plain[rows], pattern_key("x", i)) >= FOUND
                for i, rows in enumerate(sets)
            ]
            print(
                f"{side} pixels, sets of {size}: pattern found in {100 * hits:.1f} % of marked and "
                f"{100 * np.mean(alarms):.2f} % of unmarked sets"
            )


def accuracy_of_marks(
    name: str, train: ImageSet, holdout: ImageSet, student: Student, seeds: int
) -> None:
    """Print the accuracy of students trained with and without the pattern, in pairs by seed."""
    marked = ImageSet(
        add_pattern(train.images, pattern_key("sanity", 0)), train.labels, train.classes
    )
    rows = np.array(
        [[100 * student(part, holdout, seed) for part in (train, marked)] for seed in range(seeds)]
    )
    without, having = rows.T
    error = (having - without).std(ddof=1) / np.sqrt(seeds)
    change = f"{(having - without).mean():+.2f} ± {error:.2f}"
    print(
        f"{name}, {seeds} pairs: accuracy {without.mean():.2f} % without the pattern, "
        f"{having.mean():.2f} % with it: {change} points",
        flush=True,
    )


def from_scratch(train: ImageSet, holdout: ImageSet, seed: int) -> float:
    return evaluate_classifier(
        "cnn", train, holdout, schedule_of("cnn", len(train), 1), {}, seed
    ).accuracy


def measure_marks(seeds: int, folder: Path, images: int) -> None:
    """Print how reliably the pattern is found, and how much accuracy it costs students.

    One student is a linear classifier on the features of a network trained on drawn glyphs. The
    other is a CNN. Each is trained on `images` training images of Fashion-MNIST and tested on the
    test images. Then it is trained on one half of scikit-learn's digits and tested on the other.
    """
    whole, _ = real_images(False, folder, images)
    train = whole.take(np.arange(images))
    pixels = read_idx(folder / "t10k-images-idx3-ubyte.gz")[..., None]
    holdout = ImageSet(
        pixels, read_idx(folder / "t10k-labels-idx1-ubyte.gz").astype(np.int64), CLASSES
    )
    rates_of_marks(holdout.images[:1000])
    bunch = load_digits()
    small = np.rint(bunch.images * 255 / 16).astype(np.uint8)[..., None]
    digits = shuffled(
        ImageSet(small, bunch.target.astype(np.int64), tuple("0123456789")), len(small)
    )
    half = len(digits) // 2
    parts = {
        "digits": (digits.take(np.arange(half)), digits.take(np.arange(half, len(digits)))),
        "Fashion-MNIST": (train, holdout),
    }
    for name, (seen, unseen) in parts.items():
        linear = partial(
            on_public_features, embedded_extractor(drawn_set("glyphs", seen.shape, 200), "glyphs")
        )
        accuracy_of_marks(f"{name}, linear on public features", seen, unseen, linear, seeds)
    for name, (seen, unseen) in parts.items():
        accuracy_of_marks(f"{name}, CNN", seen, unseen, from_scratch, seeds)


def on_public_features(
    extractor: Extractor, train: ImageSet, holdout: ImageSet, seed: int
) -> float:
    return score_student(extractor, train, holdout, seed).accuracy


def main(
    images: Annotated[int, typer.Option(help="Images in each set.")] = 5000,
    folder: Annotated[Path, typer.Option(help="Folder of Fashion-MNIST's four .gz files.")] = Path(
        "/usr/share/datasets/fashion-mnist"
    ),
    drawn: Annotated[
        bool, typer.Option("--drawn", help="Use drawn glyphs as real images.")
    ] = False,
    plots: Annotated[
        Path | None,
        typer.Option(
            help="Folder for neighbours.png, which shows images of the half-copied set, each "
            "beside its nearest training image."
        ),
    ] = None,
    seconds: Annotated[
        str, typer.Option(help="Only time each measure, for sets of these sizes.")
    ] = "",
    marks: Annotated[
        int,
        typer.Option(
            help="Only measure the mark in pixels. Number of pairs of students, one trained with "
            "the mark and one without."
        ),
    ] = 0,
) -> None:
    if marks:
        return measure_marks(marks, folder, images)
    if seconds:
        return seconds_of_measures([int(size) for size in seconds.split(",")])
    whole, other = real_images(drawn, folder, images)
    train, holdout, fresh = (whole.take(np.arange(i * images, (i + 1) * images)) for i in range(3))
    random = np.random.default_rng(0)
    start = time.perf_counter()
    extractor = embedded_extractor(drawn_set("glyphs", (1, 28, 28), 200), "glyphs")
    print(
        f"{extractor.name} initialised at random and trained in "
        f"{time.perf_counter() - start:.0f} s; digest {extractor.digest[:8]}"
    )
    train_features, holdout_features = extractor(train.images), extractor(holdout.images)
    title = f"{images} images in each set, compared with the hold-out, {extractor.name}"
    numbers: dict[str, dict[str, float]] = {}  # results of each set
    beside = Table(
        *(
            "set",
            "training images nearer than the k-th nearest hold-out image",
            "p",
            "ε ≥",
            "alarm",
            "accuracy",
            "interval",
            "worst class",
            "gap",
            "ECE",
        ),
        "on public features",
    )
    chosen = [name for name in chosen_metrics(Evaluate()) if METRICS[name].measure]
    for name, part in sets_of_known_quality(train, fresh, other, random).items():
        start = time.perf_counter()
        features = extractor(part.images)
        novel = features, train_features, holdout_features
        found = fidelity(name, features, holdout_features, novel, extractor, chosen, print)
        numbers[name] = {key: value for key, value in found.items() if isinstance(value, float)}
        numbers[name]["s"] = time.perf_counter() - start
        copies = disclosure(part, train, holdout, extractor)
        scores, row = judged(part, holdout)
        low, high = row["interval"]
        worst = min(row["per_class"], key=lambda one: one["mean"])
        gap = np.mean([one["mean"] for one in row["per_class"]]) - worst["mean"]
        near = f"{copies['near']}, {copies['chance']:.0f} by chance (k = {copies['rank']})"
        words = [
            f"{copies['p']:.2g}",
            f"{copies['epsilon']:.2g}",
            "yes" if copies["rings"] else "no",
        ]
        shares = [f"{100 * row['mean']:.1f}", f"{100 * low:.1f} to {100 * high:.1f}"]
        shares += [
            f"{worst['class']} {100 * worst['mean']:.1f}",
            f"{100 * gap:.1f}",
            f"{100 * row['calibration']:.1f}",
        ]
        second = score_students(extractor, {name: part}, holdout, (0,))["trained_on"][name]
        beside.add_row(name, near, *words, *shares, f"{100 * second['mean']:.1f}")
        if name in ("real, unseen", "1 % copied from training", "half copied from training"):
            distances = [nearest_rows(real, features)[1] for real in novel[1:]]
            again = p_by_shuffling(distances[0], distances[1], copies["rank"], random)
            twice = min(1.0, again * (2 if images > 100 else 1))
            by_rank = f"estimated from {SHUFFLES} shuffles, k = {copies['rank']}: {twice:.2g}"
            print(
                f"{name}: MIND {found['mind']:.4f}; by an independent computation "
                f"{sliced_by_torch(features, holdout_features):.4f}"
            )
            print(f"{name}: p {copies['p']:.2g}; {by_rank}")
            print(
                f"{name}: ε ≥ {copies['epsilon']:.4f}, by root finding "
                f"{epsilon_by_tails(*distances):.4f}"
            )
            once_more = reliability_by_scikit_learn(scores, holdout.labels)
            shown_before = low, high, worst["mean"], row["calibration"]
            for what, *values in zip(
                ("lower end", "upper end", "worst class", "ECE"),
                shown_before,
                once_more,
                strict=True,
            ):
                print(
                    f"{name}: {what} {100 * values[0]:.2f}; by an independent computation "
                    f"{100 * values[1]:.2f}"
                )
        if plots and name.startswith("half"):
            plot_neighbours(extractor, part, train, plots / "neighbours.png")
    columns = [key for key in numbers["real, unseen"] if not key.endswith("_std")]
    table = Table("set", *(key.replace("_", " ") for key in columns), title=title)
    for name, measured in numbers.items():
        table.add_row(name, *(f"{measured.get(key, np.nan):.3g}" for key in columns))
    for shown in (table, beside):
        Console(width=200).print(shown)
    groups_of_known_accuracy()


if __name__ == "__main__":
    typer.run(main)
