import math

import numpy as np
import pytest
from complexity import complexity, complexity_by_step, entropy, grey, texture_complexity

from sfumato.data.images import save_images
from sfumato.storage.artifacts import read_artifact, write_empty, writing

RNG = np.random.default_rng(0)


def test_entropy_is_computed_from_grey_levels():
    flat = np.full(256, 9)
    halves = np.repeat([[3, 200]], 128, axis=0)
    every = np.arange(256)
    images = np.stack([part.reshape(16, 16, 1) for part in (flat, halves, every)]).astype(np.uint8)
    assert entropy(images) == pytest.approx([0, math.log(2), math.log(256)])


def pattern_entropy(plane):
    """Compute the entropy of the local binary patterns, pixel by pixel."""
    counts = [0] * 10
    circle = [(-1, -1), (-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1)]
    for i in range(1, plane.shape[0] - 1):
        for j in range(1, plane.shape[1] - 1):
            bits = [int(plane[i + a, j + b] >= plane[i, j]) for a, b in circle]
            changes = sum(bits[n] != bits[n - 1] for n in range(8))
            counts[sum(bits) if changes <= 2 else 9] += 1
    shares = [c / sum(counts) for c in counts if c]
    return -sum(p * math.log(p) for p in shares)


def test_texture_is_the_entropy_of_local_patterns():
    images = RNG.integers(0, 6, size=(4, 7, 9, 1)).astype(np.uint8)
    assert texture_complexity(images) == pytest.approx(
        [pattern_entropy(image[..., 0].astype(int)) for image in images]
    )


def test_smooth_images_are_simpler_than_busy_ones():
    ramp = np.tile(np.arange(0, 240, 15), (16, 1)).astype(np.uint8)[None, ..., None]
    noise = RNG.integers(0, 256, size=(1, 16, 16, 1)).astype(np.uint8)
    blank, smooth, busy = (
        texture_complexity(images)[0] for images in (np.full_like(ramp, 7), ramp, noise)
    )
    assert blank == 0 and smooth < 0.1 < 1.5 < busy


def test_colour_is_read_as_luminance():
    colour = np.zeros((1, 4, 4, 3), dtype=np.uint8)
    colour[..., 1] = 100
    assert (grey(colour) == 59).all() and (
        grey(np.full((1, 4, 4, 3), 77, dtype=np.uint8)) == 77
    ).all()
    assert complexity(colour) == {"entropy": 0.0, "texture_complexity": 0.0, "images": 1}


def test_tiny_images_are_refused():
    with pytest.raises(ValueError, match="three pixels"):
        texture_complexity(np.zeros((2, 2, 8, 1), dtype=np.uint8))


def test_the_table_has_the_steps_that_are_on(digits, tmp_path):
    write_empty(tmp_path / "central", "central")
    with writing(tmp_path / "auxiliary", "auxiliary") as directory:
        save_images(directory, digits.take(np.arange(20)))
    steps = (read_artifact(tmp_path / name, name) for name in ("central", "auxiliary"))
    found = complexity_by_step(digits.take(np.arange(30)), digits, *steps)
    assert list(found) == ["auxiliary", "release", "real"] and found["auxiliary"]["images"] == 20
