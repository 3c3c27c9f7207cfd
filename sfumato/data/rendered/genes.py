"""Drawn images by a vector of numbers in place of chance: the numbers are the parameters of the image, and can vary.

What a drawing function asks of its random stream is read from a vector in [0, 1)^n, its genes, in order: a font, an
angle, the noise of a texture. A small step of the genes is a small step of the image, whatever is drawn.
Source: the primary sample space of Kelemen et al. 2002; renderers' parameters for Private Evolution: Sim-PE (Lin et
al. 2025).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri

from sfumato.data.images import Shape
from sfumato.data.rendered import drawing

MEASURED, LONGEST = 8, 8192  # images of each class by which the number of genes is found, and the most there may be


class Genes:
    """The random stream that a drawing function is given: it reads `values`, (n,) in [0, 1), and counts them.

    What it asks for beyond them comes from one fixed stream, so that equal genes are equal images.
    """

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.read = values, 0
        self.beyond = np.random.default_rng(0)

    def random(self, size: int | Sequence[int] | None = None) -> np.ndarray:
        number = 1 if size is None else int(np.prod(size))
        own = self.values[self.read : self.read + number]
        self.read += number
        found = np.concatenate([own, self.beyond.random(number - len(own))])
        return found.reshape(size) if size is not None else found[0]  # type: ignore[return-value]

    def uniform(self, low=0.0, high=1.0, size: int | Sequence[int] | None = None) -> np.ndarray:
        shape = np.broadcast_shapes(np.shape(low), np.shape(high)) or None if size is None else size
        return low + (np.asarray(high) - low) * self.random(shape)

    def integers(self, low: int, high: int | None = None) -> int:
        low, high = (0, low) if high is None else (low, high)
        return low + min(int(self.random() * (high - low)), high - low - 1)

    def choice(self, values: Sequence[float]) -> float:
        return values[self.integers(len(values))]

    def standard_normal(self, size: int | Sequence[int]) -> np.ndarray:
        return ndtri(self.random(size).clip(1e-9, 1 - 1e-9))


class DrawnByGenes:
    """A drawn source whose images are functions of genes.

    classes: of the source, whatever the sensitive ones are; length: n, how many genes an image has: as many as any of
    its classes was seen to read, and LONGEST at most.
    """

    def __init__(self, source: str, shape: Shape) -> None:
        self.classes, self.draw = drawing(source, shape)
        self.length = 1
        for label in range(len(self.classes)):
            for number in range(MEASURED):
                self.length = max(self.length, self.read_by(label, np.random.default_rng((label, number))))

    def read_by(self, label: int, random: np.random.Generator) -> int:
        """How many genes one image of the class reads, at most LONGEST."""
        genes = Genes(random.random(LONGEST))
        self.draw(genes, label)  # type: ignore[arg-type]
        return min(genes.read, LONGEST)

    def image(self, label: int, genes: np.ndarray) -> np.ndarray:
        """The image of a class and its genes, (n,) in [0, 1): (H, W, C) uint8."""
        return self.draw(Genes(genes), label)  # type: ignore[arg-type]
