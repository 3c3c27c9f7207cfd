"""A keyed pattern in released pictures, which survives JPEG.

Programs can use it to detect that pictures were generated. In each block of 8×8 pixels, one
coefficient of the cosine transform is rounded to a multiple of STEP. Whether the multiple is even
or odd depends on the key, the block's place in the picture, and which of 16 ranges contains the
block's mean grey level.

The key does not depend on any image, so the pattern costs no privacy. The key is public, so anyone
can check the pattern, or remove it. Source: Chen and Wornell 2001.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from sfumato.data.decoding import decode
from sfumato.errors import DataError

BLOCK = 8  # Pixels per side, the size of JPEG's blocks
GREY_LEVELS = 16  # Means of blocks fall into 16 ranges of 16 grey levels each
STEP = 3.0  # Step of the coefficient; equals JPEG's rounding at quality 90
WAVE = np.cos((2 * np.arange(BLOCK) + 1) * np.pi / BLOCK) / 2
BASIS = np.outer(WAVE, WAVE).ravel()  # (64,), of norm 1: two half waves down and two across
# A set with this score or more counts as marked.
# Without the pattern, the probability of such a score is at most 1 in 24 900.
FOUND = 4.5


def pattern_key(dataset: str, seed: int) -> str:
    """Return the pattern's key for a release. The key is not secret."""
    return hashlib.sha256(f"pattern of {dataset}, seed {seed}".encode()).hexdigest()[:32]


def carries_pattern(shape: Sequence[int]) -> bool:
    """Return whether pictures of a shape, (C, H, W), are large enough for the pattern to be found.

    The score is at most the square root of the number of cells, so pictures of a single block are
    too small.
    """
    _, height, width = shape
    return (height // BLOCK) * (width // BLOCK) * GREY_LEVELS >= FOUND**2


def blocks_of(images: np.ndarray) -> np.ndarray:
    """Cut images, (N, H, W), into complete blocks from the upper left: (N, h, w, 64)."""
    height, width = (side // BLOCK for side in images.shape[1:])
    blocks = images[:, : height * BLOCK, : width * BLOCK].reshape(
        len(images), height, BLOCK, width, BLOCK
    )
    return blocks.swapaxes(2, 3).reshape(len(images), height, width, BLOCK**2)


def coefficients(images: np.ndarray, key: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the coefficient and the cell of each block, and the sign of each cell.

    Blocks are in the same cell if they have the same place in their pictures, and if the same range
    of grey levels contains their means. The sign of a cell is 1 if the pattern rounds its blocks to
    even multiples of STEP, and −1 if it rounds them to odd ones.

    images: (N, H, W, C) uint8.

    Returns coefficients, (N, h, w), cell indices, (N, h, w), and signs, (cells,).
    """
    weights = {1: [1.0], 3: [0.299, 0.587, 0.114]}  # JPEG's conversion of colours to grey
    grey = blocks_of(images @ np.array(weights[images.shape[3]]))
    places = np.arange(grey[0, ..., 0].size).reshape(grey.shape[1:3])
    bits = hashlib.shake_256(f"{key} {places.shape}".encode()).digest(places.size * GREY_LEVELS)
    cells = places * GREY_LEVELS + grey.mean(axis=3).astype(np.int64) // GREY_LEVELS
    return grey @ BASIS, cells, 1 - 2.0 * (np.frombuffer(bits, np.uint8) & 1)


def add_pattern(images: np.ndarray, key: str) -> np.ndarray:
    """Add the pattern to images, (N, H, W, C) uint8.

    Guarantee: no pixel changes by more than one grey level.
    """
    values, cells, signs = coefficients(images, key)
    offsets = STEP * (signs[cells] < 0)
    shifts = (offsets + 2 * STEP * np.round((values - offsets) / (2 * STEP)) - values)[..., None]
    moves = np.sign(shifts * BASIS)
    free = np.where(
        moves > 0, blocks_of(images.max(axis=3)) < 255, blocks_of(images.min(axis=3)) > 0
    )
    order = np.argsort(-np.abs(BASIS), kind="stable")
    gains = (np.abs(BASIS) * free)[..., order]
    moves[..., order] *= (gains.cumsum(axis=3) - gains / 2 <= np.abs(shifts)) * (gains > 0)
    count, height, width = cells.shape
    change = moves.reshape(count, height, width, BLOCK, BLOCK).swapaxes(2, 3)
    marked = images.astype(np.int16)
    inside = marked[:, : height * BLOCK, : width * BLOCK]
    inside += change.reshape(*inside.shape[:3], 1).astype(np.int16)
    return marked.astype(np.uint8)


def pattern_score(images: np.ndarray, key: str) -> float:
    """Score how clearly a set of images, (N, H, W, C) uint8, has the pattern of a key.

    A score of FOUND or more means that the set has the pattern.

    Guarantee: if the images do not depend on the key, the score exceeds t with probability at most
    exp(-t²/2) (Hoeffding).
    """
    values, cells, signs = coefficients(images, key)
    sums = np.bincount(cells.ravel(), np.cos(np.pi * values / STEP).ravel(), len(signs))
    weights = sums / np.sqrt(np.maximum(np.bincount(cells.ravel(), minlength=len(signs)), 1))
    return float(signs @ weights / max(float(np.linalg.norm(weights)), 1e-9))


def released_score(
    files: Sequence[Path], shape: tuple[int, int, int], key: str
) -> tuple[int, float]:
    """Return how many pictures can be compared with the release, and one score for all of them.

    shape: (C, H, W) of the release. A picture of another size but the same proportions is resized
    to this shape first. Raises DataError if no picture can be compared.
    """
    channels, height, width = shape
    images = []
    for file in files:
        image = decode(file)
        if image.shape[2] == channels and image.shape[0] * width == image.shape[1] * height:
            resized = Image.fromarray(image.squeeze()).resize(
                (width, height), Image.Resampling.LANCZOS
            )
            images.append(np.asarray(resized).reshape(height, width, channels))
    if not images:
        raise DataError(
            f"no picture can be compared with the release. The release has images of "
            f"{width}×{height} pixels with {channels} channel(s): give pictures with this aspect "
            "ratio and number of channels"
        )
    return len(images), pattern_score(np.stack(images), key)
