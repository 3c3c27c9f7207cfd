"""Draw random patches of two photographs from scikit-learn, a Chinese palace and a flower.

Each photograph is a class.
"""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image

PHOTOGRAPHS = ("china", "flower")


def photo_drawer(shape: tuple[int, int, int]) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Return a function (random stream, label) -> patch, (H, W, C) uint8.

    A patch has a random place and scale, and may be mirrored.
    """
    from sklearn.datasets import load_sample_image

    channels, height, width = shape
    mode = {1: "L", 3: "RGB"}[channels]
    pictures = [
        Image.fromarray(load_sample_image(f"{name}.jpg")).convert(mode) for name in PHOTOGRAPHS
    ]

    def draw(random: np.random.Generator, label: int) -> np.ndarray:
        picture = pictures[label]
        # Scale: number of the photograph's pixels per pixel of the image
        largest = min(picture.width / width, picture.height / height)
        # If possible, the shorter side of a patch shows at least 16 pixels of the photograph
        smallest = min(max(1.0, 16 / min(height, width)), largest)
        scale = math.exp(random.uniform(math.log(smallest), math.log(largest)))
        left = random.uniform(0, picture.width - scale * width)
        top = random.uniform(0, picture.height - scale * height)
        box = (
            left,
            top,
            min(left + scale * width, picture.width),
            min(top + scale * height, picture.height),
        )
        patch = np.atleast_3d(
            np.asarray(picture.resize((width, height), Image.Resampling.LANCZOS, box=box))
        )
        return np.ascontiguousarray(patch[:, ::-1]) if random.random() < 0.5 else patch

    return draw
