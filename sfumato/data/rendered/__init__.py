"""Public image sets that the program draws: glyphs of fonts, procedural textures, patches of two
photographs.

Every image has its own random stream, seeded by (seed, class, number), so a larger set begins with
the images of a smaller set.
"""

from collections.abc import Callable, Iterator

import numpy as np

from sfumato.data.images import ImageSet, Shape
from sfumato.data.rendered.glyphs import CHARACTERS, glyph_drawer
from sfumato.data.rendered.photos import PHOTOGRAPHS, photo_drawer
from sfumato.data.rendered.procedural import FAMILIES, procedural_drawer

Draw = Callable[[np.random.Generator, int], np.ndarray]  # (random stream, label) -> (H, W, C) uint8

# By name of the source: a function from the shape (C, H, W) to the class names and a `Draw`
DRAWN: dict[str, Callable[[Shape], tuple[tuple[str, ...], Draw]]] = {
    "glyphs": lambda shape: (CHARACTERS, glyph_drawer(shape)),
    "procedural": lambda shape: (tuple(FAMILIES), procedural_drawer(shape)),
    "photos": lambda shape: (PHOTOGRAPHS, photo_drawer(shape)),
}


def draw_all(
    draw: Draw, classes: int, per_class: int, seed: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield `per_class` images of each class, (H, W, C) uint8, with their labels."""
    for number in range(per_class):
        for label in range(classes):
            yield draw(np.random.default_rng((seed, label, number)), label), label


def drawn_set(source: str, shape: Shape, per_class: int, seed: int = 0) -> ImageSet:
    """Draw `per_class` images of each class of a source in DRAWN.

    shape: (C, H, W) of each image. The set stores images as (H, W, C).
    """
    classes, draw = DRAWN[source](shape)
    images, labels = zip(*draw_all(draw, len(classes), per_class, seed), strict=True)
    return ImageSet(np.stack(images), np.array(labels, dtype=np.int64), classes)
