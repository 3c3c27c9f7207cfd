"""Compare mixtures of generated and public images, by how well a student learns from each.

    python benchmarks/public_mixtures.py label PROJECT ROWS.npz [--source auxiliary]
        [--drawn 1500] [--public 898]
    python benchmarks/public_mixtures.py score ROWS.npz --mixture drawn [--steps 120] [--seed 0]

PROJECT: folder of a project from `stage init`, with a public set. All stages up to the teacher and
the generator must have run. The project's sensitive set must in fact be public, because the
hold-out is scored. ROWS.npz: written by `label`, with generated ("drawn") images, the public images
and the hold-out. The last fifth of the drawn images is set aside for testing. The public images
that the teacher labels with the highest confidence are chosen for the mixtures. The mixtures
contain the other drawn images, the chosen public images, or both:

- `drawn`: drawn images only;
- `half`: the chosen public images, and as many drawn ones;
- `quarter`: all drawn images that are not set aside, and half of the chosen public images (by
  default, 27 % of the mixture);
- `public`: the chosen public images only.

A student's agreement with the teacher is measured on the drawn images that were set aside, and on
the public images that were not chosen, as a mean over the teacher's classes. Agreement and balanced
accuracy are in %. The accuracy is also shown on two halves of the hold-out, split by unit, so that
a setting can be chosen on one half and reported on the other.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np

from sfumato.data.images import load_images
from sfumato.data.store import load_public, read_card
from sfumato.evaluation.downstream import fit_classifier, logits, schedule_of
from sfumato.features.teacher_network import classify, load_teacher_network, relabelled
from sfumato.privacy.authorize import open_local
from sfumato.storage.state_directory import state_dir
from sfumato.training.selection import surest

JUDGES = 0.2  # Share of the drawn images that is set aside to test the students


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    label = commands.add_parser("label")
    label.add_argument("project", type=Path)
    label.add_argument("rows", type=Path)
    label.add_argument("--source", default="auxiliary", help="stage that made the drawn images")
    label.add_argument("--drawn", type=int, default=1500)
    label.add_argument("--public", type=int, default=898, help="number of public images to choose")
    score = commands.add_parser("score")
    score.add_argument("rows", type=Path)
    score.add_argument("--mixture", default="drawn", choices=("drawn", "half", "quarter", "public"))
    score.add_argument("--steps", type=int, default=120)
    score.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.command == "label":
        os.chdir(given.project)
        save_rows(given.rows, given.source, given.drawn, given.public)
    else:
        show_student(dict(np.load(given.rows)), given.mixture, given.steps, given.seed)


def save_rows(file: Path, source: str, drawn: int, number: int) -> None:
    """Write drawn and public images labelled by the teacher, and the hold-out with its own labels.

    The file is not a release, because it contains the hold-out.
    """
    card = read_card(Path("data/sensitive/card.json"))
    teacher = load_teacher_network(Path("artifacts/teacher"))
    made = load_images(Path("artifacts") / source, card.classes, shape=card.shape)
    made = relabelled(teacher, made.take(np.arange(min(drawn, len(made)))))
    public = load_public(Path("data/public"), card.shape)
    shares = classify(teacher, public).numpy()
    chosen, labels = surest(shares, number // len(card.classes))
    rest = np.setdiff1d(np.arange(len(public)), chosen)
    _, holdout = open_local(state_dir(), card, "public mixtures", everywhere=True)
    units = (
        np.arange(len(holdout))
        if holdout.groups is None
        else np.unique(holdout.groups, return_inverse=True)[1]
    )
    real = classify(teacher, holdout).numpy().argmax(axis=1)
    print(f"teacher: hold-out {scores(real, holdout.labels, units % 2)}")
    print(
        "number of public images by the teacher's class: "
        f"{np.bincount(shares.argmax(1), minlength=shares.shape[1])}"
    )
    np.savez(
        file,
        drawn=made.images,
        drawn_labels=made.labels,
        public=public.images[chosen],
        public_labels=labels,
        rest=public.images[rest],
        rest_labels=shares[rest].argmax(axis=1),
        real=holdout.images,
        real_labels=holdout.labels,
        half=units % 2,
    )


def show_student(rows: dict[str, np.ndarray], mixture: str, steps: int, seed: int) -> None:
    kept = int((1 - JUDGES) * len(rows["drawn"]))
    public = len(rows["public"])
    # Mixture -> (indices of its drawn images, indices of its public images)
    parts = {
        "drawn": (slice(kept), slice(0)),
        "half": (slice(min(kept, public)), slice(None)),
        "quarter": (slice(kept), slice(None, None, 2)),
        "public": (slice(0), slice(None)),
    }
    own, other = parts[mixture]
    images = np.concatenate([rows["drawn"][own], rows["public"][other]])
    labels = np.concatenate([rows["drawn_labels"][own], rows["public_labels"][other]])
    student = fit_classifier(
        "cnn",
        images,
        labels,
        int(labels.max()) + 1,
        schedule_of("cnn", len(images), 1, steps),
        seed,
    )
    drawn = balanced(answers(student, rows["drawn"][kept:]), rows["drawn_labels"][kept:])
    rest = balanced(answers(student, rows["rest"]), rows["rest_labels"])
    real = scores(answers(student, rows["real"]), rows["real_labels"], rows["half"])
    about = f"{mixture}, {len(images)} images, {steps} steps, seed {seed}"
    print(
        f"{about}: agreement on drawn images {drawn:.1f}, on public images {rest:.1f}; balanced "
        f"accuracy on the hold-out {real}"
    )


def answers(student, images: np.ndarray) -> np.ndarray:
    return logits(student, images).argmax(axis=1)


def balanced(given: np.ndarray, labels: np.ndarray) -> float:
    return 100 * float(
        np.mean([(given[labels == label] == label).mean() for label in np.unique(labels)])
    )


def scores(given: np.ndarray, labels: np.ndarray, half: np.ndarray) -> str:
    first, second = (balanced(given[half == part], labels[half == part]) for part in (0, 1))
    by_class = [100 * (given[labels == label] == label).mean() for label in np.unique(labels)]
    return (
        f"{balanced(given, labels):.1f} ({first:.1f}, {second:.1f}; by class "
        f"{np.round(by_class).astype(int)})"
    )


if __name__ == "__main__":
    main()
