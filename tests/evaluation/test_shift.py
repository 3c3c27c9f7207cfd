"""The distortions of the hold-out are fixed and small, and do what their names state."""

import numpy as np
import pytest

from sfumato.evaluation.shift import SHIFTS, shifted


def dot(side: int = 28, channels: int = 1) -> np.ndarray:
    images = np.zeros((1, side, side, channels), dtype=np.uint8)
    images[0, side // 2, side // 4] = 255
    return images


def centre(images: np.ndarray) -> np.ndarray:
    weights = images[0, ..., 0].astype(float)
    return np.array(
        [
            (weights.sum(1 - axis) @ np.arange(weights.shape[axis])) / weights.sum()
            for axis in (0, 1)
        ]
    )


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize(("side", "channels"), [(8, 1), (32, 3)])
def test_images_keep_shape_and_type_and_change(name, side, channels):
    images = np.random.default_rng(0).integers(0, 256, (3, side, side, channels), dtype=np.uint8)
    found = shifted(name, images)
    assert found.shape == images.shape and found.dtype == np.uint8 and (found != images).any()
    assert np.array_equal(shifted(name, images[1:2]), found[1:2])


def test_a_dot_moves_two_pixels_of_28_right_and_down():
    assert centre(shifted("moved", dot())) - centre(dot()) == pytest.approx([2, 2], abs=0.05)


@pytest.mark.parametrize("sides", [(28, 28), (28, 56), (64, 40)])
def test_a_dot_turns_by_ten_degrees_about_the_middle(sides):
    images = np.zeros((1, *sides, 1), dtype=np.uint8)
    images[0, sides[0] // 3, sides[1] // 4] = 255
    middle = (np.array(sides) - 1) / 2
    before = centre(images) - middle
    after = centre(shifted("turned", images)) - middle
    cosine = before @ after / np.linalg.norm(before) / np.linalg.norm(after)
    assert np.degrees(np.arccos(cosine)) == pytest.approx(10, abs=1.5)
    assert np.linalg.norm(after) == pytest.approx(np.linalg.norm(before), rel=0.05)


def test_blur_grows_with_the_size_of_the_image():
    assert [np.count_nonzero(shifted("blurred", dot(side))) for side in (28, 64)] == [9, 25]


def test_brighter_images_stay_at_most_white():
    pixels = np.array([0, 100, 250], dtype=np.uint8).reshape(3, 1, 1, 1)
    assert shifted("brighter", pixels).flatten().tolist() == [26, 146, 255]
