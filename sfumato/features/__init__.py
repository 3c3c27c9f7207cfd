"""Public maps of an image: what a release may be made of, one entry of FEATURES each, by the name in the parameters.

A map takes (B, C, H, W) float32 in [0, 1] to (B, d), differentiably, and was made from public data alone.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from sfumato.data.images import Shape
from sfumato.features.scattering import DeepScattering, Moduli, Scattering
from sfumato.features.tangent import Tangent

FEATURES: dict[str, Callable[[Shape], nn.Module]] = {  # name -> what makes the map for images of a shape (C, H, W)
    "pixels": lambda shape: nn.Flatten(),
    "scattering": Scattering,
    "deep-scattering": DeepScattering,
    "moduli": Moduli,
    "tangent": Tangent,
}
