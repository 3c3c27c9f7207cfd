"""Load the images and labels for the warm-up from artifacts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.ndimage import median_filter
from torch import Tensor

from sfumato.data.images import ImageSet, Shape, check_labels, load_array, load_images
from sfumato.data.store import load_public
from sfumato.errors import DataError, explained
from sfumato.settings.stages import STAGES
from sfumato.storage.documents import read_json
from sfumato.training.curriculum import Images, MappedImages

SELECT_AGAIN = "run `stage select` again"


def training_sets(
    paths: Mapping[str, Path], shape: Shape, classes: Sequence[str]
) -> tuple[dict[str, tuple[Images, Tensor]], int]:
    """Load images and labels of the sources in `paths`.

    paths: directory of each source's artifact. A source is "central", "public" or a stage that
    writes images. "public" also needs the artifact of "select".

    Returns images and labels by source, and the number of extra (public) classes in the labels.
    """
    sources: dict[str, tuple[Images, Tensor]] = {}
    extra = 0
    if "central" in paths:
        sources["central"] = load_central(paths["central"], shape)
        check_labels(sources["central"][1].numpy(), tuple(classes), paths["central"])
    for name in STAGES["pretrain"].upstream:
        if name in paths and STAGES[name].gives:
            drawn = load_images(paths[name], classes, shape=shape)
            sources[name] = MappedImages(drawn.images), torch.from_numpy(np.array(drawn.labels))
    if "public" in paths:
        public = load_public(paths["public"], shape)
        selected, labels, extra = public_training_set(public, paths["select"], len(classes))
        sources["public"] = selected, labels
    return sources, extra


def load_central(directory: Path, shape: Shape) -> tuple[Tensor, Tensor]:
    """Load all releases of `stage central`: ((R·M, C, H, W) float32 in [0, 1], (R·M,) int64).

    Each of the R releases has one image for each of the M classes. If the releases contain a
    histogram for each pixel, the value of a pixel is the midpoint of its fullest bin. With or
    without histograms, a median filter of each channel then reduces the noise, at no privacy cost.

    shape: (C, H, W) of the sensitive images. Raises DataError for a release of another shape.
    """
    file = directory / ("mode.npy" if (directory / "mode.npy").is_file() else "mean.npy")
    released = torch.from_numpy(np.array(load_array(file)))
    if released.dtype != torch.float32 or not released.isfinite().all():
        raise DataError(
            f"{file} contains values other than finite float32 numbers: run `stage central` again"
        )
    if (
        released.ndim != (6 if file.stem == "mode" else 5)
        or released.shape[-3:] != shape
        or 0 in released.shape
    ):
        raise DataError(
            f"{file} has shape {(*released.shape,)}, which does not fit sensitive images of shape "
            f"{shape}: run `stage central` again"
        )
    if file.stem == "mode":
        released = (released.argmax(dim=2).float() + 0.5) / released.shape[2]
    repeats, classes = released.shape[:2]
    images = median_filter(released.flatten(0, 1).clamp(0, 1).numpy(), (1, 1, 3, 3), mode="nearest")
    return torch.from_numpy(images), torch.arange(classes).repeat(repeats)


def public_training_set(
    public: ImageSet, selection: Path, classes: int | None
) -> tuple[MappedImages, Tensor, int]:
    """Return the selected images (memory-mapped), their labels, and the number of extra classes.

    selection: directory that `stage select` wrote;
    classes: M, number of sensitive classes; None if the selection relabelled images to sensitive
    classes.

    Labels are row indices of the label table of `UNet(extra_classes=k)`. If the selection
    relabelled images to sensitive classes (PrivImage), labels are 0..M-1, and k = 0. Otherwise
    (RPGen), label M + 1 + j means the j-th of the k selected public classes. Raises DataError if
    the selection is damaged or belongs to another public set.
    """
    file = selection / "selection.json"
    with explained(DataError, lambda error: f"{file} cannot be read ({error!r}): {SELECT_AGAIN}"):
        content = read_json(file)
        relabelled = {"sensitive": True, "public": False}[content["labels"]]
        selected_classes = len(content["classes"])
    classes = classes or selected_classes
    arrays = []
    for name, end in (
        ("indices.npy", len(public)),
        ("labels.npy", classes if relabelled else selected_classes),
    ):
        array = np.array(load_array(selection / name))
        if array.dtype != np.int64 or array.ndim != 1:
            raise DataError(
                f"{selection / name} is {array.dtype} {array.shape}, expected int64 (n,): "
                f"{SELECT_AGAIN}"
            )
        if len(array) and not (array.min() >= 0 and array.max() < end):
            raise DataError(
                f"{selection / name} contains values {array.min()} to {array.max()}, expected 0 to "
                f"{end - 1}. The file is damaged, or was made from another public set: "
                f"{SELECT_AGAIN}"
            )
        arrays.append(array)
    rows, labels = arrays
    if not len(rows):
        raise DataError(
            f"{selection} contains no image: raise select.ratio, or prepare more public images"
        )
    if len(rows) != len(labels):
        raise DataError(
            f"{selection} has {len(rows)} indices, but {len(labels)} labels: {SELECT_AGAIN}"
        )
    images = MappedImages(public.images, rows)
    if relabelled:
        return images, torch.from_numpy(labels), 0
    return images, torch.from_numpy(labels) + classes + 1, selected_classes
