"""Choose public images and relabel them, by votes for their classes or by the teacher's labels.

Only releases and public images are read, so the choice costs nothing, and the number of images may
be tuned.

Source: RPGen stage 1; PrivImage.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sfumato.data.images import ImageSet, load_array
from sfumato.errors import DataError, explained
from sfumato.settings.training import Select
from sfumato.storage.documents import read_json
from sfumato.storage.files import write_csv, write_json
from sfumato.storage.png import save_png, to_grid

# Number of images per class in `example_grid`, and number of public classes per row of a table
EXAMPLES = 6


class Kept(NamedTuple):
    public: int  # number of the kept public class, or index of the kept image
    row: int  # the sensitive class to which it is assigned; 0 without votes per sensitive class
    votes: float  # noisy votes for the class, or the teacher's probability; NaN if there is neither


def number_to_keep(settings: Select, public_classes: int, rows: int = 1) -> int:
    """Return how many public classes to keep: the share `settings.ratio`, but at least `rows`.

    rows: number of rows of the histogram.
    """
    return max(rows, round(settings.ratio * public_classes))


def select_classes(histogram: np.ndarray, keep: int) -> list[Kept]:
    """Choose the `keep` public classes with the most votes, in descending order.

    histogram: (R, P), noisy votes for P public classes. With a single row, the `keep` classes with
    the most votes are chosen (RPGen). With one row per sensitive class (PrivImage), pairs of a row
    and a public class are processed in descending order of votes. Each pair assigns its public
    class to its row, unless the class is already assigned or the row is full. In the end, each row
    has ⌊keep/R⌋ or ⌈keep/R⌉ classes. Ties go to the smaller row index, then to the smaller class
    index.
    """
    rows, public_classes = histogram.shape
    share, extra = divmod(keep, rows)
    assigned = np.zeros(public_classes, dtype=bool)
    counts = np.zeros(rows, dtype=np.int64)
    kept: list[Kept] = []
    for pair in np.argsort(-histogram, axis=None, kind="stable"):
        row, public = divmod(int(pair), public_classes)
        if assigned[public] or counts[row] > share or (counts[row] == share and not extra):
            continue
        extra -= int(counts[row] == share)
        assigned[public] = True
        counts[row] += 1
        kept.append(Kept(public, row, float(histogram[row, public])))
        if len(kept) == keep:
            break
    return kept


def select_public(settings: Select, votes: np.ndarray | None, public_classes: int) -> list[Kept]:
    """Choose the public classes to keep, by votes, (R, P).

    Without votes, all classes are kept. In this case, the plan refuses a `select.ratio` below 1.
    """
    if votes is not None:
        return select_classes(votes, number_to_keep(settings, public_classes, len(votes)))
    return [Kept(public, 0, math.nan) for public in range(public_classes)]


def read_votes(histogram: Path, public: Sequence[str], classes: int) -> tuple[np.ndarray, bool]:
    """Read the noisy votes of `stage histogram`.

    public: names of the public classes;
    classes: number of sensitive classes.

    Returns the votes, (R, P), and whether they have one row per sensitive class. Raises DataError
    if the votes are not finite, are for other public classes, or are for another number of
    sensitive classes.
    """
    votes = load_array(histogram / "histogram.npy")
    file = histogram / "histogram.json"
    with explained(
        DataError, lambda error: f"{file} cannot be read ({error!r}): run `stage histogram` again"
    ):
        content = read_json(file)
        per_class = bool(content["per_class"])
        public_classes = tuple(content["public_classes"])
    if votes.dtype.kind != "f" or not np.isfinite(votes).all():
        raise DataError(
            f"{histogram} contains votes that are not finite numbers: run `stage histogram` again"
        )
    if public_classes != tuple(public):
        raise DataError(
            f"{histogram} contains votes for classes that differ from those in the public set: run "
            "`stage classifier` and `stage histogram` again"
        )
    expected = (classes if per_class else 1, len(public))
    if votes.shape != expected:
        raise DataError(
            f"{histogram} has votes of shape {votes.shape}, expected {expected}: run `stage "
            "histogram` again"
        )
    return votes, per_class


def save_selection(
    directory: Path,
    images: ImageSet,
    kept: Sequence[Kept],
    indices: np.ndarray,
    labels: np.ndarray,
    sensitive: Sequence[str] | None,
) -> None:
    """Write the chosen images and their labels, a table of the kept classes, and example images.

    sensitive: names of the sensitive classes, if the images are relabelled to these; otherwise
    None.
    """
    names = [images.classes[choice.public] for choice in kept]
    rows = []
    for rank, (choice, name) in enumerate(zip(kept, names, strict=True), start=1):
        votes = None
        if not math.isnan(choice.votes):
            votes = choice.votes
        became = sensitive[choice.row] if sensitive else name
        rows.append(
            {"public_class": name, "noisy_count": votes, "rank": rank, "relabelled_as": became}
        )
    columns = {"public_class": "", "noisy_count": ".2f", "rank": "", "relabelled_as": ""}
    write_csv(directory / "selection.csv", rows, columns)
    save_choice(
        directory,
        indices,
        labels,
        "sensitive" if sensitive else "public",
        sensitive or names,
        names,
    )
    save_png(directory / "selection.png", example_grid(images, kept))


def save_choice(
    directory: Path,
    indices: np.ndarray,
    labels: np.ndarray,
    kind: str,
    classes: Sequence[str],
    kept: Sequence[str],
) -> None:
    """Write the chosen images and their labels.

    kind: "sensitive" if the new labels are sensitive classes, "public" if they are public classes;
    classes: name of the class of each label; kept: names of the kept classes, in the order of
    choice.
    """
    np.save(directory / "indices.npy", indices, allow_pickle=False)
    np.save(directory / "labels.npy", labels, allow_pickle=False)
    content = {"labels": kind, "classes": list(classes), "kept": list(kept), "images": len(indices)}
    write_json(directory / "selection.json", content)


def relabel(
    labels: np.ndarray, kept: Sequence[Kept], public_classes: int, per_class: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the public images to keep, ascending, and their new labels, both int64.

    labels: (N,) int64, public classes of all images;
    per_class: whether the new label of an image is the sensitive class to which its public class
    was assigned (PrivImage). Otherwise, the new label is the position of its public class in
    `kept`, from 0.
    """
    label_of = np.full(public_classes, -1, dtype=np.int64)
    for rank, choice in enumerate(kept):
        label_of[choice.public] = choice.row if per_class else rank
    new_labels = label_of[labels]
    indices = np.flatnonzero(new_labels >= 0)
    return indices.astype(np.int64), new_labels[indices]


def surest(probabilities: np.ndarray, per_class: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose, for each class, the `per_class` images with the teacher's highest probability.

    An image is chosen for only one class: pairs of a class and an image are processed in descending
    order of probability, as in `select_classes`. probabilities: (N, M), the teacher's probabilities
    of the M classes for N public images. Returns (int64 indices, int64 labels), sorted by class and
    then by descending probability.
    """
    choices = select_classes(probabilities.T, per_class * probabilities.shape[1])
    indices, labels, _ = zip(*sorted(choices, key=lambda choice: choice.row), strict=True)
    return np.array(indices, dtype=np.int64), np.array(labels, dtype=np.int64)


def save_surest(
    directory: Path,
    images: ImageSet,
    probabilities: np.ndarray,
    indices: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
) -> None:
    """Write the chosen images and labels, some of the images as a picture, and a table.

    For each class, the table contains the number of chosen images, the teacher's lowest confidence
    in one of them, and the public classes from which most of them come.

    probabilities: (N, M), the teacher's probabilities; indices, labels: result of `surest`; names:
    names of the M classes.
    """
    save_choice(directory, indices, labels, "sensitive", names, names)
    rows = []
    for label, name in enumerate(names):
        chosen = indices[labels == label]
        counts = np.bincount(images.labels[chosen], minlength=len(images.classes))
        common = [
            images.classes[i] for i in np.argsort(-counts, kind="stable")[:EXAMPLES] if counts[i]
        ]
        lowest = probabilities[chosen, label].min()
        rows.append(
            {
                "class": name,
                "images": len(chosen),
                "least_sure": lowest,
                "most_frequent": " ".join(common),
            }
        )
    columns = {"class": "", "images": "", "least_sure": ".3f", "most_frequent": ""}
    write_csv(directory / "selection.csv", rows, columns)
    examples = np.concatenate([indices[labels == label][:12] for label in range(len(names))])
    grid = to_grid(images.batch(examples)[0], min(12, len(indices) // len(names)))
    save_png(directory / "selection.png", grid)


def example_grid(images: ImageSet, kept: Sequence[Kept]) -> np.ndarray:
    """Draw EXAMPLES images for each of the first 60 kept classes, one row each: (H', W', C) uint8.

    Missing images are white.
    """
    cells = np.ones((len(kept[:60]) * EXAMPLES, *images.shape), dtype=np.float32)
    for row, choice in enumerate(kept[:60]):
        members = np.flatnonzero(images.labels == choice.public)
        examples = members[
            np.linspace(0, len(members) - 1, min(EXAMPLES, len(members))).astype(np.int64)
        ]
        cells[row * EXAMPLES : row * EXAMPLES + len(examples)] = images.batch(examples)[0].numpy()
    return to_grid(cells, EXAMPLES)
