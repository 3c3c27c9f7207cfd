"""Grids of images: the names beside the rows can be read, and leave room for the images."""

import numpy as np
import pytest

from sfumato.storage.png import WIDEST_NAME, named_grid, to_grid

IMAGES = np.zeros((1, 1, 8, 8))


def margin(name: str) -> np.ndarray:
    """Return the part of a grid to the left of its only image."""
    grid = named_grid(IMAGES, [name], 1, 48)
    return grid[:, : grid.shape[1] - to_grid(IMAGES, 1, 48).shape[1]]


@pytest.mark.parametrize(("name", "other"), [("Ödem", "Üdem"), ("жар", "шар")])
def test_letters_of_other_alphabets_are_drawn(name, other):
    assert not np.array_equal(margin(name), margin(other))


def test_a_name_that_the_font_lacks_becomes_a_number():
    assert np.array_equal(margin("肺炎"), margin("0"))


def test_a_long_name_leaves_room_for_the_images():
    assert margin("long " * 25).shape[1] <= WIDEST_NAME + 18
