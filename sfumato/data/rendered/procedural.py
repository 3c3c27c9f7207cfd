"""Draw textures with six classical generators, in grey or in colour. Each generator is a class.

Sources: dead leaves (Lee, Mumford, Huang 2001; as public images: Baradad et al. 2021), 1/f noise
(Field 1987), gradient noise (Perlin 1985), cellular noise (Worley 1996). Lengths are in units of
the image's shorter side.
"""

import math
from collections.abc import Callable

import numpy as np


def procedural_drawer(
    shape: tuple[int, int, int],
) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Return a function (random stream, label) -> texture, (H, W, C) uint8.

    Textures with edges are drawn at double size, then reduced by averaging 2×2 pixels.
    """
    channels, height, width = shape
    textures = list(FAMILIES.values())
    edged = (dead_leaves, shapes, cells)

    def draw(random: np.random.Generator, label: int) -> np.ndarray:
        texture = textures[label]
        factor = 2 if texture in edged else 1
        image = texture(random, height * factor, width * factor, channels)
        image = image.reshape(height, factor, width, factor, channels).mean(axis=(1, 3))
        return np.rint(image.clip(0, 1) * 255).astype(np.uint8)

    return draw


def dead_leaves(random: np.random.Generator, height: int, width: int, channels: int) -> np.ndarray:
    """Draw 288 overlapping discs, which cover nearly all of the background.

    The density of their radii is proportional to r⁻³.
    """
    y, x = (axis.ravel() for axis in grid(height, width))
    image = np.broadcast_to(random.random(channels), (height * width, channels)).copy()
    uncovered = np.arange(height * width)
    min_radius = random.uniform(0.03, 0.08)
    max_radius = random.uniform(0.3, 0.6)
    for _ in range(12):  # draws 24 discs at a time, from front to back
        radius = (max_radius**-2 + random.random(24) * (min_radius**-2 - max_radius**-2)) ** -0.5
        centre = random.uniform(-0.2, [[1.2 * y[-1]], [1.2 * x[-1]]], (2, 24))
        # Squared distances, (uncovered pixels, 24)
        square = (y[uncovered, None] - centre[0]) ** 2 + (x[uncovered, None] - centre[1]) ** 2
        inside = square < radius**2
        hit = inside.any(axis=1)
        image[uncovered[hit]] = random.random((24, channels))[inside[hit].argmax(axis=1)]
        uncovered = uncovered[~hit]
    return image.reshape(height, width, channels)


def fractal_noise(
    random: np.random.Generator, height: int, width: int, channels: int
) -> np.ndarray:
    """Draw Gaussian noise with amplitude 1/f^β and correlated channels. β is in 0.6..1.8."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    white = np.fft.rfft2(random.standard_normal((channels + 1, height, width)))
    spectrum = white * frequency ** -random.uniform(0.6, 1.8)
    noise = np.fft.irfft2(spectrum, s=(height, width)).transpose(1, 2, 0)
    noise /= noise.std(axis=(0, 1)) + 1e-12
    correlation = random.uniform(0.3, 1)  # correlation of the channels
    mixed = correlation * noise[..., :1] + math.sqrt(1 - correlation**2) * noise[..., 1:]
    return random.uniform(0.3, 0.7, channels) + random.uniform(0.12, 0.25) * mixed


def gradient_noise(
    random: np.random.Generator, height: int, width: int, channels: int
) -> np.ndarray:
    """Draw Perlin noise of one to five octaves, as a mixture of three colours."""
    cells = random.uniform(1.5, 6)
    octaves = int(random.integers(1, 6))
    waves = [
        0.55**octave * perlin(random, height, width, cells * 2**octave) for octave in range(octaves)
    ]
    value = np.sum(waves, axis=0)
    value = (value - value.min()) / (np.ptp(value) + 1e-12)
    low, middle, high = random.random((3, channels))
    value = value[..., None]
    return np.where(
        value < 0.5, low + 2 * value * (middle - low), middle + (2 * value - 1) * (high - middle)
    )


def perlin(random: np.random.Generator, height: int, width: int, cells: float) -> np.ndarray:
    """Draw one octave, (H, W), from random unit gradients on a lattice with `cells` cells along the
    shorter side.
    """
    y, x = (axis * cells for axis in grid(height, width))
    row = y.astype(int)
    column = x.astype(int)
    angle = random.uniform(0, 2 * math.pi, (int(y[-1, 0]) + 2, int(x[0, -1]) + 2))
    dy = y - row
    dx = x - column
    corner = [
        [
            np.cos(turn := angle[row + i, column + j]) * (dx - j) + np.sin(turn) * (dy - i)
            for j in (0, 1)
        ]
        for i in (0, 1)
    ]
    u, v = (t**3 * (t * (6 * t - 15) + 10) for t in (dx, dy))
    above, below = (left + u * (right - left) for left, right in corner)
    return above + v * (below - above)


def gratings(random: np.random.Generator, height: int, width: int, channels: int) -> np.ndarray:
    """Draw one to three sine or square waves between two colours, in random directions."""
    y, x = grid(height, width)
    wave = np.zeros((height, width))
    sharpness = random.choice([0.0, 3.0, 12.0])
    for _ in range(random.integers(1, 4)):
        angle = random.uniform(0, math.pi)
        cycles = math.exp(random.uniform(math.log(1.5), math.log(9)))
        phase = random.uniform(0, 2 * math.pi)
        grating = np.sin(2 * math.pi * cycles * (x * math.cos(angle) + y * math.sin(angle)) + phase)
        if sharpness:
            grating = np.tanh(sharpness * grating)
        wave += random.uniform(0.4, 1) * grating
    wave = 0.5 + 0.5 * wave[..., None] / (np.abs(wave).max() + 1e-12)
    low, high = contrasting_colours(random, channels)
    return low + wave * (high - low)


def shapes(random: np.random.Generator, height: int, width: int, channels: int) -> np.ndarray:
    """Draw one to five overlapping ellipses and convex polygons on a gradient between two
    colours.
    """
    y, x = grid(height, width)
    angle = random.uniform(0, 2 * math.pi)
    ramp = (0.5 + 0.7 * ((x - 0.5) * math.cos(angle) + (y - 0.5) * math.sin(angle))).clip(0, 1)[
        ..., None
    ]
    start, ink = contrasting_colours(random, channels)
    image = start + ramp * random.uniform(0, 0.5) * (random.random(channels) - start)
    for _ in range(random.integers(1, 6)):
        size = random.uniform(0.1, 0.4)
        turn = random.uniform(0, 2 * math.pi)
        dy = y - random.uniform(0, y[-1, 0])
        dx = x - random.uniform(0, x[0, -1])
        rotated_x = dx * math.cos(turn) + dy * math.sin(turn)
        rotated_y = (dy * math.cos(turn) - dx * math.sin(turn)) / random.uniform(0.4, 1)
        if random.random() < 0.4:
            inside = rotated_x**2 + rotated_y**2 < size**2
        else:
            sides = int(random.integers(3, 7))
            normal = 2 * math.pi * (np.arange(sides) + random.uniform(-0.2, 0.2, sides)) / sides
            reach = size * random.uniform(0.5, 0.9, sides)
            inside = (
                rotated_x[..., None] * np.cos(normal) + rotated_y[..., None] * np.sin(normal)
                < reach
            ).all(axis=2)
        image[inside] = ink
        ink = random.random(channels)
    return image


def cells(random: np.random.Generator, height: int, width: int, channels: int) -> np.ndarray:
    """Draw Worley noise of 6 to 40 points: plain cells, distances to the nearest point, or walls
    between cells.
    """
    y, x = grid(height, width)
    count = int(random.integers(6, 41))
    point = random.uniform(-0.1, [[1.1 * y[-1, 0]], [1.1 * x[0, -1]]], (2, count))
    # Squared distance, (H, W, points)
    square = (y[..., None] - point[0]) ** 2 + (x[..., None] - point[1]) ** 2
    kind = random.integers(3)
    if kind == 0:
        return random.random((count, channels))[square.argmin(axis=2)]
    nearest = np.sqrt(np.partition(square, 1, axis=2)[..., :2])
    value = nearest[..., 0]
    if kind == 2:
        value = np.minimum(nearest[..., 1] - value, random.uniform(0.03, 0.15))
    low, high = contrasting_colours(random, channels)
    return low + (value / value.max())[..., None] * (high - low)


# Functions from (random stream, H, W, C) to (H, W, C) float. Values are clipped to [0, 1] later
FAMILIES = {
    "dead-leaves": dead_leaves,
    "fractal-noise": fractal_noise,
    "gradient-noise": gradient_noise,
    "gratings": gratings,
    "shapes": shapes,
    "cells": cells,
}


def grid(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixel centres, y and x (H, W), in units of the shorter side."""
    side = min(height, width)
    y, x = np.meshgrid(
        (np.arange(height) + 0.5) / side, (np.arange(width) + 0.5) / side, indexing="ij"
    )
    return y, x


def contrasting_colours(
    random: np.random.Generator, channels: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw two colours (C,) in [0, 1] that differ by at least 0.35 in some channel."""
    first, second = random.random((2, channels))
    while np.abs(first - second).max() < 0.35:
        second = random.random(channels)
    return first, second
