"""Read NumPy archives of the owner or of MedMNIST. Pickles are refused."""

import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data.groups import checked_ids, ids_of_array
from sfumato.data.images import GROUPS_REFUSED, check_labels
from sfumato.data.sources.packed import arrays_in
from sfumato.data.sources.source import Form, Request, Source, examples
from sfumato.errors import ConfigError, DataError
from sfumato.settings.fields import composed

AS_PLAIN_ARRAYS = "write it with np.savez and plain arrays."


def read_npz(request: Request, raw: Path) -> Source:
    """Read an archive with the arrays `images`, `labels` and `classes`, or a file of MedMNIST.

    `images` is (N, H, W) or (N, H, W, C) uint8. `labels` is (N,) or (N, 1) integers or, with
    `data.labels: several`, (N, classes) of 0 and 1. `classes` contains names, as strings.

    A file of MedMNIST has the arrays `train_images` and `train_labels`, and the same for `val_` and
    `test_`. The arrays `val_…` are added to the training images. The arrays `test_…` become the
    hold-out. The file contains no class names, so `data.classes` must list them. They are not
    derived from the labels, because a list of the classes that occur would reveal something about
    the images.

    The ids of persons are in the array `groups`, or in the array that `data.groups.column` names.
    """
    path = request.required_path()
    if not path.is_file():
        raise DataError(
            f"{request.section}.path={path} is not a file: expected an .npz with images, labels "
            "and classes, or a file of MedMNIST."
        )
    groups = request.groups
    if groups is not None and not (groups.array or groups.column):
        raise ConfigError(
            "data.groups: an archive has no file names, so the ids of persons must be in an array "
            "of the archive: add this array, and set data.groups: {array: true}"
        )
    arrays = arrays_in(path, AS_PLAIN_ARRAYS)
    parts = [""]  # prefix of the arrays of each part; empty if there is only one part
    if "train_images" in arrays:
        parts = [part for part in ("train_", "val_", "test_") if f"{part}images" in arrays]
    required_arrays = [f"{part}{name}" for part in parts for name in ("images", "labels")]
    names: Any = request.classes
    if parts == [""] or not names:
        required_arrays.append("classes")
        names = arrays.get("classes")
    ids_in: list[str] = []
    if groups is not None:
        owners = groups.column or "groups"
        ids_in = [owners] if owners in arrays else [f"{part}{owners}" for part in parts]
    if missing := [name for name in required_arrays + ids_in if name not in arrays]:
        if missing == ["classes"] and parts != [""]:
            raise DataError(
                f"{path} contains no class names, as is usual for files of MedMNIST: list the "
                f"names, in the order of the labels, in {request.section}.classes: [a, b, …]."
            )
        raise DataError(
            f"{path} lacks the array(s) {', '.join(missing)}: write the file again with np.savez, "
            "with each of these as a plain array."
        )
    if request.sensitive and "groups" in arrays and groups is None:
        raise DataError(f"{path}: `groups` {GROUPS_REFUSED}.")
    names = np.asarray(names)
    classes = tuple(composed(str(name)) for name in names.flat)
    if names.dtype.kind != "U" or names.ndim != 1 or not classes or len({*classes}) < len(classes):
        raise DataError(
            f"{path}: the array of class names is {names.dtype} {names.shape}, expected one "
            "dimension of distinct strings."
        )
    labels = {part: labels_of(path, arrays, part, classes, request.several) for part in parts}
    size = sum(map(len, labels.values()))
    persons = None
    if groups is not None:
        sizes = [size] if ids_in == [owners] else map(len, labels.values())
        ids = [
            ids_of_array(arrays[name], count, f"{path}: `{name}`")
            for name, count in zip(ids_in, sizes, strict=True)
        ]
        persons = checked_ids([*chain.from_iterable(ids)], groups)

    iterators = {
        part: examples(arrays[f"{part}images"], labels[part], request, path.name) for part in parts
    }
    test = iterators.pop("test_", None)
    if not request.sensitive:
        test = None
    all_labels = chain.from_iterable(labels.values())
    train = chain.from_iterable(iterators.values())
    return Source(
        classes,
        train,
        test,
        size,
        persons,
        labels=all_labels,
        held_out=len(labels.get("test_", ())),
    )


def labels_of(
    path: Path, arrays: dict[str, np.ndarray], part: str, classes: tuple[str, ...], several: bool
) -> np.ndarray:
    """Return the labels of a part, (N,) or, with several labels per image, (N, classes).

    Raises DataError if images or labels have the wrong type, or do not fit together.
    """
    images = arrays[f"{part}images"]
    labels = arrays[f"{part}labels"]
    if (
        images.dtype != np.uint8
        or images.ndim not in (3, 4)
        or images.shape[3:] not in ((), (1,), (3,))
    ):
        description = f"{part}images are {images.dtype} {images.shape}"
        raise DataError(
            f"{path}: {description}, expected uint8 (N, H, W) or (N, H, W, C) with C 1 or 3: "
            "convert the array, and write the file again with np.savez."
        )
    check_integers(path, f"{part}labels", labels)
    count = len(images)
    expected = [(count,), (count, 1)]
    hint = "; for several labels per image, set data.labels: several"
    if several:
        expected = [(count, len(classes))]
        hint = ""
    if labels.shape not in expected:
        description = f"{part}labels are {labels.dtype} {labels.shape}"
        raise DataError(f"{path}: {description}, expected integers {expected[0]}{hint}.")
    if not several:
        labels = labels.reshape(-1)
    check_labels(labels, classes, path)
    return labels


def check_integers(path: Path, name: str, labels: np.ndarray) -> None:
    """Raise DataError if the labels in the array `name` are not integers."""
    if labels.dtype.kind not in "iu":
        raise DataError(
            f"{path}: {name} are {labels.dtype} {labels.shape}, expected integers: number the "
            "classes from 0, and write their names, in this order, into the array `classes`. If an "
            "image may have several labels, write a matrix of the integers 0 and 1."
        )


def archive_layout(path: Path) -> tuple[Form, list[str]]:
    """Describe the layout of an archive.

    Returns keys of a `Request`, and the names of the arrays, without the prefixes `train_`, `val_`
    and `test_`. If the archive does not name its classes, as in MedMNIST, each class is named by
    its number.
    """
    arrays = arrays_in(path, AS_PLAIN_ARRAYS)
    stems = {name: re.sub("^(train|val|test)_", "", name) for name in arrays}
    labels = []
    for name, array in arrays.items():
        if stems[name] == "labels" and array.size:
            check_integers(path, name, array)
            labels.append(array)
    several = any(part.ndim == 2 and part.shape[1] > 1 for part in labels)
    form: Form = {"name": "npz", "several": several}
    if "classes" not in arrays and labels:
        count = labels[0].shape[-1] if several else 1 + int(max(part.max() for part in labels))
        form["classes"] = tuple(map(str, range(count)))
    return form, sorted({*stems.values()})
