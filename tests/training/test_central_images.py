import torch

from sfumato.training.central_images import central_training_set


def test_means_become_labelled_images_of_the_full_size():
    released = torch.full((3, 2, 1, 4, 4), 1.7)  # (R, M, C, H', W'), noise beyond [0, 1]
    images, labels = central_training_set(released, "mean", (1, 8, 8))
    assert images.shape == (6, 1, 8, 8) and torch.equal(images, torch.ones_like(images))
    assert labels.tolist() == [0, 1, 0, 1, 0, 1]


def test_modes_become_the_midpoint_of_the_fullest_bin():
    histograms = torch.zeros(1, 2, 2, 1, 4, 4)
    histograms[0, 0, 0], histograms[0, 1, 1] = 5.0, 5.0
    images, _ = central_training_set(histograms, "mode", (1, 4, 4), median=1)
    assert images[0].unique().tolist() == [0.25] and images[1].unique().tolist() == [0.75]
