"""The feature space that an evaluation compares in, as its parameters name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from sfumato.data.images import ImageSet, Shape
from sfumato.data.rendered import drawn_set
from sfumato.evaluation.extractors import Extractor, build_extractor
from sfumato.settings.evaluate import Evaluate

DRAWN_PER_CLASS = {"glyphs": 200, "procedural": 2000}  # what the embedded feature network is trained on


def feature_space(settings: Evaluate, shape: Shape, say: Callable[[str], None]) -> Extractor | None:
    """The extractor for images of `shape`; None where no fidelity is asked for.

    say: told of a network to be trained.
    """
    if not settings.metrics:
        return None

    def drawn() -> tuple[ImageSet, str]:
        source: Literal["glyphs", "procedural"] = "glyphs" if shape[0] == 1 else "procedural"
        say(f"feature network on drawn images ({source})")
        return drawn_set(source, shape, DRAWN_PER_CLASS[source]), source

    return build_extractor(settings, shape, drawn)
