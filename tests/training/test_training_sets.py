import numpy as np
import pytest
import torch

from sfumato.errors import DataError
from sfumato.training.training_sets import load_central, training_sets


def test_means_become_labelled_images_in_range(tmp_path):
    # (R, M, C, H, W), with noise that exceeds [0, 1]
    np.save(tmp_path / "mean.npy", np.full((3, 2, 1, 4, 4), 1.7, dtype=np.float32))
    images, labels = load_central(tmp_path, (1, 4, 4))
    assert images.shape == (6, 1, 4, 4) and torch.equal(images, torch.ones_like(images))
    assert labels.tolist() == [0, 1, 0, 1, 0, 1]


def test_modes_become_the_midpoint_of_the_fullest_bin(tmp_path):
    histograms = np.zeros((1, 2, 2, 1, 4, 4), dtype=np.float32)
    histograms[0, 0, 0], histograms[0, 1, 1] = 5.0, 5.0
    np.save(tmp_path / "mode.npy", histograms)
    images, _ = load_central(tmp_path, (1, 4, 4))
    assert images[0].unique().tolist() == [0.25] and images[1].unique().tolist() == [0.75]


@pytest.mark.parametrize(
    "shape", [(2, 3, 3, 8, 8), (2, 3, 1, 4, 4), (2, 4, 1, 8, 8), (3, 1, 8, 8), (2, 3, 1, 0, 8)]
)
def test_central_images_of_another_shape_are_refused(tmp_path, shape):
    np.save(tmp_path / "mean.npy", np.zeros(shape, np.float32))
    with pytest.raises(DataError):
        training_sets({"central": tmp_path}, (1, 8, 8), ("a", "b", "c"))
