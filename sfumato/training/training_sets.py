"""What the warm-up shows: images and labels of each source, from the artifacts that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sfumato.data.images import Shape, load_images
from sfumato.data.store import load_public
from sfumato.storage.png import to_grid
from sfumato.training.central_images import load_central
from sfumato.training.curriculum import Images, MappedImages, as_float
from sfumato.training.public_images import public_training_set, some_of_each


@dataclass
class TrainingSets:
    """sources: images and labels by name; extra_classes: further classes that they need; pictures: to look at."""

    sources: dict[str, tuple[Images, Tensor]] = field(default_factory=dict)
    extra_classes: int = 0
    pictures: dict[str, np.ndarray] = field(default_factory=dict)


def training_sets(paths: Mapping[str, Path], shape: Shape, classes: Sequence[str]) -> TrainingSets:
    """The sets of "central", "auxiliary", "refine", "evolve" and "public", of those in `paths`, by stage.

    "public" needs "select" too.
    """
    sets = TrainingSets()
    if "central" in paths:
        images, labels = load_central(paths["central"], shape)
        sets.sources["central"] = images, labels
        sets.pictures["central"] = to_grid(images, len(classes))
    for name in ("auxiliary", "refine", "evolve"):
        if name in paths:
            drawn = load_images(paths[name], classes)
            sets.sources[name] = MappedImages(drawn.images), torch.from_numpy(np.array(drawn.labels))
    if "public" in paths:
        public = load_public(paths["public"], shape)
        selected, labels, sets.extra_classes = public_training_set(public, paths["select"], len(classes))
        sets.sources["public"] = selected, labels
        sets.pictures["public"] = to_grid(as_float(some_of_each(selected, labels)), 10)
    return sets
