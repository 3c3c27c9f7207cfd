"""Patches of two photographs, recoloured: alone, or joined along a smooth edge, or blended, with a patch or a texture.

The way of it is the class. They show nothing that can be named; what they lend to others is edges and textures.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from sfumato.data.rendered.photos import PHOTOGRAPHS, photo_drawer
from sfumato.data.rendered.procedural import FAMILIES, procedural_drawer

WAYS = ("alone", "joined", "blended")
KNOTS, EDGE = 4, 8.0  # of the smooth field whose sign joins two pictures; how sharply it does
BLEND = (0.35, 0.9)  # the part of the first picture in a blend


def collage_drawer(shape: tuple[int, int, int]) -> Callable[[np.random.Generator, int], np.ndarray]:
    """A function (random stream, label) -> one collage, (H, W, C) uint8; the label is a place in WAYS."""
    from PIL import Image

    _, height, width = shape
    photo, texture = photo_drawer(shape), procedural_drawer(shape)

    def patch(random: np.random.Generator) -> np.ndarray:
        return recoloured(photo(random, int(random.integers(len(PHOTOGRAPHS)))), random)

    def woven(random: np.random.Generator) -> np.ndarray:
        return recoloured(texture(random, int(random.integers(len(FAMILIES)))), random)

    def draw(random: np.random.Generator, label: int) -> np.ndarray:
        image, way, part = patch(random), WAYS[label], np.ones(1)
        if way == "joined":
            ground = patch(random) if random.random() < 0.5 else woven(random)
            field = Image.fromarray(random.standard_normal((KNOTS, KNOTS)).astype(np.float32))
            smooth = np.asarray(field.resize((width, height), Image.Resampling.BICUBIC))
            part = 1 / (1 + np.exp(-EDGE * smooth.clip(-4, 4)))[..., None]
        elif way == "blended":
            ground, part = woven(random), random.uniform(*BLEND, 1)
        else:
            ground = image
        return np.rint(255 * (part * image + (1 - part) * ground)).astype(np.uint8)

    return draw


def recoloured(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Another order of the channels, mirrored, perhaps turned or inverted, another saturation, contrast and light.

    (H, W, C) uint8 -> (H, W, C) float in [0, 1].
    """
    x = image[..., random.permutation(image.shape[2])] / 255
    if random.random() < 0.5:
        x = x[:, ::-1]
    if random.random() < 0.25 and x.shape[0] == x.shape[1]:
        x = x.transpose(1, 0, 2)
    if random.random() < 0.2:
        x = 1 - x
    grey = x.mean(axis=2, keepdims=True)
    x = grey + random.uniform(0.1, 1) * (x - grey)
    mean = x.mean(axis=(0, 1))
    x = mean + random.uniform(0.6, 1.8) * (x - mean) + random.uniform(-0.2, 0.2)
    return x.clip(0, 1) ** math.exp(random.uniform(-0.5, 0.5))  # type: ignore[no-any-return]
