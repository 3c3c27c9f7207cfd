"""Make a training set of the warm-up from the public set and a selection: which images, and the label of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sfumato.data.images import ImageSet, load_array
from sfumato.errors import DataError, explained
from sfumato.storage.documents import read_json
from sfumato.training.curriculum import Images, MappedImages

AGAIN = "run `stage select` again"


def public_training_set(public: ImageSet, selection: Path, classes: int | None) -> tuple[MappedImages, Tensor, int]:
    """The selected images (still memory-mapped), the label of each, and how many extra classes they add to the model.

    selection: directory that `stage select` wrote; classes: M, of the sensitive set, None where it is known to have
    relabelled. Labels are rows of the label table of `UNet(extra_classes=k)`: sensitive classes 0..M-1 where the
    selection relabelled to them (PrivImage; k = 0), else M + 1 + j for the j-th of its k public classes (RPGen).
    Raises DataError where the selection is damaged or belongs to another public set.
    """
    rows, labels = (np.array(load_array(selection / name)) for name in ("indices.npy", "labels.npy"))
    file = selection / "selection.json"
    with explained(DataError, lambda error: f"{file} cannot be read ({error!r}): {AGAIN}"):
        about = read_json(file)
        own, kept = {"sensitive": True, "public": False}[about["labels"]], len(about["classes"])
    classes = kept if classes is None else classes
    check_rows(rows, labels, len(public), classes if own else kept, selection)
    return MappedImages(public.images, rows), torch.from_numpy(labels) + (0 if own else classes + 1), 0 if own else kept


def check_rows(rows: np.ndarray, labels: np.ndarray, images: int, classes: int, selection: Path) -> None:
    """Raise DataError unless every row is one of the public images and every label a class."""
    for name, array, end in (("indices.npy", rows, images), ("labels.npy", labels, classes)):
        if array.dtype != np.int64 or array.ndim != 1:
            raise DataError(f"{selection / name} is {array.dtype} {array.shape}, expected int64 (n,): {AGAIN}")
        if len(array) and not (array.min() >= 0 and array.max() < end):
            raise DataError(
                f"{selection / name} holds {array.min()}..{array.max()}, expected 0..{end - 1}: "
                f"it fits another public set, {AGAIN}"
            )
    if not len(rows):
        raise DataError(f"{selection} keeps no image: raise select.ratio, or prepare more public images")
    if len(rows) != len(labels):
        raise DataError(f"{selection} holds {len(rows)} indices but {len(labels)} labels: {AGAIN}")


def some_of_each(images: Images, labels: Tensor, each: int = 10, most: int = 40) -> Tensor:
    """The first `each` images of each of the `most` lowest labels, to show. Returns (n, C, H, W) in the images' dtype.

    Black images fill up a label that has fewer, so a grid of `each` columns has one label per row.
    """
    grid = []
    for label in labels.unique()[:most]:
        shown = images[(labels == label).nonzero().flatten()[:each]]
        grid.append(torch.cat([shown, shown.new_zeros(each - len(shown), *shown.shape[1:])]))
    return torch.cat(grid)
