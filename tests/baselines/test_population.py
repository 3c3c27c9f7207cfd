"""A release drawn from the images of a stage, such as the last population of Private Evolution."""

from pathlib import Path

import numpy as np
import pytest
import torch

from sfumato.data.images import ImageSet, save_images
from sfumato.diffusion.denoiser import Sampling
from sfumato.errors import DataError
from sfumato.release.synthesis import draw_mixture
from sfumato.settings.release import Synthesize
from sfumato.training.training_sets import training_sets


def drawn_from(
    population: Path, shape: tuple[int, ...] = (8, 8, 1), classes: tuple[str, ...] = tuple("abc")
) -> None:
    """Draw a release from a population with this shape of images and these classes."""
    images = np.zeros((6, *shape), np.uint8)
    save_images(population, ImageSet(images, np.arange(6) % len(classes), classes))
    settings = Synthesize(count=5, sources={"evolve": 1})
    sampling = Sampling(steps=1, shape=(1, 8, 8))
    draw_mixture({"evolve": population}, settings, torch.ones(3) / 3, 0, sampling=sampling)


@pytest.mark.parametrize("shape", [(9, 9, 1), (8, 8, 3)])
def test_a_population_of_other_images_is_not_released(tmp_path, shape):
    drawn_from(tmp_path)
    with pytest.raises(DataError, match="labels 0..5"):
        drawn_from(tmp_path, classes=tuple("abcdef"))
    with pytest.raises(DataError, match=r"images\.npy have"):
        drawn_from(tmp_path, shape)
    with pytest.raises(DataError, match=r"images\.npy have"):
        training_sets({"evolve": tmp_path}, (1, 8, 8), tuple("abc"))
