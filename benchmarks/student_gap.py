"""Find out why networks trained on a release are less accurate than its teacher, and what helps.

    OMP_NUM_THREADS=1 python benchmarks/student_gap.py PROJECT STATE {causes,heads,labels,draws}
        [--steps 300] [--seeds 0,1] [--side 32] [--part choosing] [--only "NAME;NAME"]
    python benchmarks/student_gap.py PROJECT STATE picture --file grid.png

PROJECT has a release with `synthesize.stream: true` and one entry in `synthesize.sources`. Its
hold-out is in STATE.
The hold-out is split at random into two halves, by person if persons are known: use `choosing` to
choose among variants, and `final` only for final results. Every network is trained for the same
number of steps of 128 images. It is a `cnn`; only `draws` also trains the network of `stage
student`. For each seed, two balanced accuracies in % are printed: on the images of the half that
--part names, and on the same images shifted by up to a sixteenth of their shorter side. `heads`
prints only the first. The results are local, because they are measured on real images. `causes`
also trains networks and last layers on real images, and `heads` fits last layers to them.

- `causes`: compares networks trained on the release with networks trained on real images, both
  without and with shifts and scaling. For networks trained on the release, it also recomputes the
  batch norms' statistics on the other half of the hold-out, which needs no labels, and refits the
  last layer on the release and on real images
- `heads`: fits last layers to real images, without noise. Their accuracy is an upper bound for last
  layers with differential privacy on the same features
- `labels`: trains on images that are labelled by several rules. Some rules change the labels of
  distorted images only, some leave images out, and the rule `blends` makes new images
- `draws`: compares networks trained on the release's images, a network trained on its stream, and
  the network of `stage student`
- `picture`: draws images of the stream, ten per class, by their likeliest class
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from copy import deepcopy
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from torch import Tensor, nn

from sfumato import load_release, stream
from sfumato.data.images import ImageSet, as_bytes, as_floats
from sfumato.data.store import load_prepared, read_card
from sfumato.evaluation.classifiers import CLASSIFIERS, Classifier, build_classifier
from sfumato.evaluation.downstream import unit_numbers
from sfumato.features.teacher_network import (
    Labelling,
    TeacherNetwork,
    at_shares,
    probabilities_of,
    share_offsets,
)
from sfumato.release.loading import Release
from sfumato.release.stream import Stream, view
from sfumato.release.student import train_student
from sfumato.release.synthesis import mixed
from sfumato.release.variation import PLAIN
from sfumato.settings.training import Student
from sfumato.storage.png import named_grid, save_png
from sfumato.training.supervised import Schedule, apply, logits, to_tensor, train_supervised

JUDGE = "cnn"
MOVED = 16  # An image is shifted by at most its shorter side / MOVED
WHOLE = 10_000  # A side larger than any image's, so that images are not shrunk
SCALED = 0.1  # Largest change of the scale
REFITTED = 4000  # Largest number of images to refit a last layer on
SHOWN = 10  # Images of each class in a picture
BLENDS = 25_600
PART = 512  # Blends to label at a time
Batches = Iterator[tuple[Tensor, Tensor]]


class Project:
    """A project's release, its stream, and its real images, which must stay with the owner."""

    def __init__(self, folder: Path, state: Path, part: str, side: int) -> None:
        self.release: Release = load_release(folder / "artifacts" / "synthesize")
        self.stream: Stream = stream(self.release.path, augment=False)
        self.side = side
        card = read_card(folder / "data" / "sensitive" / "card.json")
        self.whole_real: ImageSet = load_prepared(state, card, "sensitive")
        self.real = stored(self.whole_real, side)
        held_out = load_prepared(state, card, "holdout")
        parts = halves(held_out)
        whole, other = parts if part == "choosing" else parts[::-1]
        self.judged = {
            size: [stored(whole, size, shift) for shift in (False, True)] for size in (side, WHOLE)
        }
        self.other = stored(other, side)
        named = ImageSet(self.release.images, self.release.labels, self.release.classes)
        self.released = stored(named, side)

    @cached_property
    def rules(self) -> dict[str, tuple[np.ndarray, Tensor]]:
        return sets_by_rule(self)

    def scores(self, model: nn.Module, side: int | None = None) -> str:
        """Format a network's balanced accuracy in %, on the images and on shifted images."""
        return " / ".join(
            f"{balanced(logits(model, part.images), part):.1f}"
            for part in self.judged[side or self.side]
        )


def halves(held_out: ImageSet) -> list[ImageSet]:
    """Split a hold-out at random into two halves, by person if persons are known."""
    persons = unit_numbers(len(held_out), held_out.groups)
    order = np.random.default_rng(0).permutation(persons.max() + 1)
    return [held_out.take(np.isin(persons, part)) for part in np.array_split(order, 2)]


def balanced(scores: np.ndarray, judged: ImageSet) -> float:
    return float(100 * balanced_accuracy_score(judged.labels, scores.argmax(axis=1)))


def shrunk(images: Tensor, side: int) -> Tensor:
    """Shrink images, (B, C, H, W), by averaging blocks; the shorter side stays at least `side`."""
    return F.avg_pool2d(images, max(1, min(images.shape[2:]) // side))


def stored(image_set: ImageSet, side: int, shift: bool = False) -> ImageSet:
    """Shrink the images of a set. shift: whether to shift them first."""
    random = torch.Generator().manual_seed(0)
    parts = []
    for rows in np.array_split(np.arange(len(image_set)), -(-len(image_set) // 500)):
        pixels = to_tensor(image_set.images[rows], "cpu")
        if shift:
            pixels = moved(pixels, random, scaled=0)
        parts.append((255 * shrunk(pixels, side)).round().byte().permute(0, 2, 3, 1).numpy())
    return ImageSet(np.concatenate(parts), image_set.labels, image_set.classes)


def moved(images: Tensor, random: torch.Generator | None, scaled: float = SCALED) -> Tensor:
    """Shift and scale images, (B, C, H, W), at random. Pixels at the edges are repeated."""
    count, _, height, width = images.shape
    reach = min(height, width) // MOVED
    shifts = (
        torch.randint(-reach, reach + 1, (count, 2), generator=random)
        * 2
        / torch.tensor([width, height])
    )
    sizes = 1 + scaled * (2 * torch.rand(count, 1, 1, generator=random) - 1)
    affine = torch.cat([torch.eye(2) * sizes, shifts[:, :, None]], dim=2)
    grid = F.affine_grid(affine, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def shuffled(images: np.ndarray, targets: Tensor, augment: bool = False) -> Batches:
    """Yield batches without end, in a new order at each pass.

    targets: (N, classes) float32; each row sums to 1.
    """
    while True:
        for rows in torch.randperm(len(images)).split(Schedule.batch):
            if len(rows) == Schedule.batch:
                pixels = to_tensor(images[rows.numpy()], "cpu")
                yield moved(pixels, None) if augment else pixels, targets[rows]


def drawn(project: Project, seed: int, augment: bool) -> Batches:
    batches = stream(project.release.path, Schedule.batch, seed, augment)
    return ((shrunk(images, project.side), labels) for images, labels, _ in batches)


def trained(project: Project, batches: Batches, steps: int, seed: int) -> Classifier:
    spec = CLASSIFIERS[JUDGE]
    schedule = Schedule(
        steps=steps,
        learning_rate=spec.peak_learning_rate,
        weight_decay=spec.weight_decay,
        soft=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_classifier(JUDGE, project.released.shape, len(project.release.classes))
        train_supervised(model, batches, schedule)
    return model


def one_hot(labels: np.ndarray, classes: int) -> Tensor:
    return F.one_hot(torch.tensor(np.asarray(labels)), classes).float()


@torch.no_grad()
def with_statistics_of(model: Classifier, images: np.ndarray) -> Classifier:
    """Copy a network, and recompute the means and variances of its batch norms on `images`."""
    model = deepcopy(model).eval()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None  # averages over all batches
            layer.train()
    for part in np.array_split(images, max(1, len(images) // 200)):
        model(to_tensor(part, "cpu"))
    return model.eval()


def with_head_of(model: Classifier, images: np.ndarray, labels: np.ndarray) -> Classifier:
    """Copy a network, and refit its last layer to labelled images."""
    rows = np.random.default_rng(0).permutation(len(images))[:REFITTED]
    model = deepcopy(model).eval()
    features = apply(model.features, images[np.sort(rows)], "cpu")
    scale = features.std()
    fitted = LogisticRegression(max_iter=1000).fit(features / scale, labels[np.sort(rows)])
    model.head.weight.data.copy_(torch.from_numpy(fitted.coef_ / scale))
    model.head.bias.data.copy_(torch.from_numpy(fitted.intercept_))
    return model


def causes(project: Project, steps: int, seed: int, only: list[str]) -> None:
    release, real = project.release, project.real
    classes = len(release.classes)
    sets = {
        "release": (project.released.images, release.labels),
        "real": (real.images, real.labels),
    }
    for name, (images, labels) in sets.items():
        for augment in (False, True):
            what = f"{name}, moved and scaled" if augment else name
            if only and what not in only:
                continue
            model = trained(
                project, shuffled(images, one_hot(labels, classes), augment), steps, seed
            )
            told = partial(print, f"seed {seed}", flush=True)
            told(what, project.scores(model), sep=" | ")
            if name == "release":
                told(
                    "  batch statistics of real images",
                    project.scores(with_statistics_of(model, project.other.images)),
                    sep=" | ",
                )
                for source, (shown, named) in sets.items():
                    told(
                        f"  head fitted to {source}",
                        project.scores(with_head_of(model, shown, named)),
                        sep=" | ",
                    )
                both = with_head_of(
                    with_statistics_of(model, project.other.images), real.images, real.labels
                )
                told("  batch statistics and head of real images", project.scores(both), sep=" | ")


def sets_by_rule(project: Project) -> dict[str, tuple[np.ndarray, Tensor]]:
    """Label the release by each rule.

    Returns, by name of the rule, images, (N, H, W, C) uint8, and targets, (N, classes).
    """
    release, drawing = project.release, project.stream
    teacher, labelling = drawing.teacher, drawing.labelling
    assert teacher is not None and labelling is not None
    classes = len(release.classes)
    settings = drawing.settings.model_copy(update={"count": len(release)})
    sources, requested, _ = mixed(partial(drawing.parts, spread=1.0), settings, drawing.seed)
    kinds = release.kinds
    plain, rows = np.flatnonzero(kinds == PLAIN), np.flatnonzero(kinds == "distorted")
    assert np.array_equal(sources[plain].permute(0, 2, 3, 1).numpy(), release.images[plain]), (
        "the stream and the release have different plain images"
    )
    before = probabilities_of(teacher, sources[rows])
    images = torch.from_numpy(np.array(release.images)).permute(0, 3, 1, 2)
    after = probabilities_of(teacher, images)
    numbers = requested[plain].bincount(minlength=classes) * len(rows) / len(plain)
    shares_before, shares_after = (
        at_shares(seen, labelling.offsets[PLAIN]) for seen in (before, after[rows])
    )
    by_source, by_mean = shares_before.argmax(dim=1), (shares_before + shares_after).argmax(dim=1)
    by_each = at_shares(after[rows], share_offsets(after[rows], numbers)).argmax(dim=1)
    hard = one_hot(release.labels, classes)
    as_now = hard[rows].argmax(dim=1)
    shown = project.released.images
    differing = rows[(as_now != by_source).numpy()]
    agreeing = np.setdiff1d(np.arange(len(release)), differing)
    undistorted = shown.copy()
    as_drawn = ImageSet(sources.permute(0, 2, 3, 1).numpy(), release.labels, release.classes)
    undistorted[differing] = stored(as_drawn, project.side).images[differing]
    soft = labelling.soft(after, PLAIN).float()
    mean = soft.clone()
    mean[rows] = (soft[rows] + labelling.soft(before, PLAIN).float()) / 2
    for name, labels in {"teacher": as_now, "each kind": by_each, "source": by_source}.items():
        shares = labels.bincount(minlength=classes).tolist()
        told = [float((labels == other).double().mean()) for other in (requested[rows], by_source)]
        print(
            f"rule {name}: number of images by class {shares}; share of labels equal to the "
            f"requested class: {told[0]:.2f}, to the undistorted image's class: {told[1]:.2f}",
            flush=True,
        )

    def relabelled(labels: Tensor) -> Tensor:
        targets = hard.clone()
        targets[rows] = one_hot(labels.numpy(), classes)
        return targets

    return {
        "teacher": (shown, hard),
        "each kind": (shown, relabelled(by_each)),
        "source": (shown, relabelled(by_source)),
        "mean": (shown, relabelled(by_mean)),
        "both agree": (shown[agreeing], hard[torch.from_numpy(agreeing)]),
        "others undistorted": (undistorted, relabelled(by_source)),
        "without offsets": (shown, one_hot(after.argmax(dim=1).numpy(), classes)),
        "soft, without offsets": (shown, after.float()),
        "soft": (shown, soft),
        "soft mean": (shown, mean),
        "asked for": (shown, one_hot(requested.numpy(), classes)),
        "plain only": (shown[plain], hard[torch.from_numpy(plain)]),
        "blends": blends(images, teacher, labelling, project),
    }


def blends(
    images: Tensor, teacher: TeacherNetwork, labelling: Labelling, project: Project
) -> tuple[np.ndarray, Tensor]:
    """Blend pairs of released images, distort each blend, and let the teacher label the result.

    An eighth of the results are single images, not blended. images: (N, C, H, W) uint8. Returns
    the results, (BLENDS, H, W, C) uint8, shrunk to `project.side`, and soft targets,
    (BLENDS, classes).
    """
    random = torch.Generator().manual_seed(0)
    shown, targets = [], []
    for _ in range(0, BLENDS, PART):
        first, second = (
            as_floats(images[rows])
            for rows in torch.randint(len(images), (2, PART), generator=random)
        )
        share = torch.rand(PART, 1, 1, 1, generator=random)
        share[: PART // 8] = 1
        changed = view(moved(second.lerp(first, share), random), project.stream.mirrored, random)
        targets.append(labelling.soft(probabilities_of(teacher, as_bytes(changed)), PLAIN))
        shown.append(as_bytes(shrunk(changed, project.side)).permute(0, 2, 3, 1))
    return torch.cat(shown).numpy(), torch.cat(targets).float()


def heads(project: Project, steps: int, seed: int, only: list[str]) -> None:
    """Fit a last layer to real images, on features of the teacher, of a network, and of both."""
    teacher = project.stream.teacher
    assert teacher is not None
    hard = one_hot(project.release.labels, len(project.release.classes))
    model = trained(project, shuffled(project.released.images, hard, augment=True), steps, seed)
    rows = np.sort(np.random.default_rng(0).permutation(len(project.real))[:REFITTED])
    real = project.whole_real.take(rows)
    judged = project.judged[WHOLE][0]
    found = {
        "teacher's features": [
            apply(teacher.features, part.images, "cpu") for part in (real, judged)
        ],
        "network's features": [
            apply(model.features, part.images, "cpu")
            for part in (project.real.take(rows), project.judged[project.side][0])
        ],
    }
    scaled = {name: [part / each[0].std() for part in each] for name, each in found.items()}
    scaled["both"] = [np.concatenate(parts, axis=1) for parts in zip(*scaled.values(), strict=True)]
    for name, (fitted, seen) in scaled.items():
        head = LogisticRegression(max_iter=1000).fit(fitted, real.labels)
        told = balanced_accuracy_score(judged.labels, head.predict(seen))
        print(f"seed {seed}", f"head on {name}", f"{100 * told:.1f}", sep=" | ", flush=True)


def labels(project: Project, steps: int, seed: int, only: list[str]) -> None:
    for rule, (images, targets) in project.rules.items():
        if not only or rule in only:
            model = trained(project, shuffled(images, targets), steps, seed)
            print(f"seed {seed}", rule, project.scores(model), sep=" | ", flush=True)


def draws(project: Project, steps: int, seed: int, only: list[str]) -> None:
    release = project.release
    hard = one_hot(release.labels, len(release.classes))
    images = project.released.images
    makers = {
        "fixed": lambda: trained(project, shuffled(images, hard), steps, seed),
        "fixed, moved and scaled": lambda: trained(
            project, shuffled(images, hard, augment=True), steps, seed
        ),
        "stream": lambda: trained(project, drawn(project, seed, True), steps, seed),
        "stream, as drawn": lambda: trained(project, drawn(project, seed, False), steps, seed),
        "student": lambda: train_student(release.path, Student(steps=steps), seed),
    }
    for name, make in makers.items():
        if not only or name in only:
            start = time.process_time()
            model = make()
            minutes = (time.process_time() - start) / 60
            side = WHOLE if name == "student" else None
            print(
                f"seed {seed}",
                name,
                project.scores(model, side),
                f"{minutes:.1f} minutes",
                sep=" | ",
                flush=True,
            )


def picture(project: Project, file: Path) -> None:
    images, targets, _ = next(
        iter(stream(project.release.path, 100 * len(project.release.classes), 0))
    )
    chosen = [
        (targets.argmax(dim=1) == label).nonzero().flatten()[:SHOWN]
        for label in range(targets.shape[1])
    ]
    save_png(file, named_grid(images[torch.cat(chosen)], project.release.classes, SHOWN, 64))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("project", type=Path)
    parser.add_argument("state", type=Path)
    parser.add_argument("measure", choices=["causes", "heads", "labels", "draws", "picture"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument(
        "--side", type=int, default=WHOLE, help="shrink images to about this side for the networks"
    )
    parser.add_argument("--part", default="choosing", choices=["choosing", "final"])
    parser.add_argument("--only", default="", help="names of rows to measure, separated by ;")
    parser.add_argument("--file", type=Path, default=Path("stream.png"))
    arguments = parser.parse_args()
    project = Project(arguments.project, arguments.state, arguments.part, arguments.side)
    if arguments.measure == "picture":
        return picture(project, arguments.file)
    teacher = project.stream.teacher
    if teacher is not None:
        print("teacher", project.scores(teacher, WHOLE), sep=" | ", flush=True)
    measure = {"causes": causes, "heads": heads, "labels": labels, "draws": draws}[
        arguments.measure
    ]
    for seed in map(int, arguments.seeds.split(",")):
        measure(
            project, arguments.steps, seed, [name for name in arguments.only.split(";") if name]
        )


if __name__ == "__main__":
    main()
