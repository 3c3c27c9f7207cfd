"""The teacher assigns labels with the requested shares, and guides images towards a label."""

import numpy as np
import pytest
import torch

from sfumato.data.images import ImageSet, as_uint8
from sfumato.diffusion.denoiser import Sampling
from sfumato.diffusion.unet import UNet
from sfumato.features.projection import ProjectedFeatures
from sfumato.features.teacher_network import (
    TeacherNetwork,
    at_shares,
    guide_by,
    probabilities_of,
    relabelled,
    share_offsets,
)
from sfumato.settings.training import Architecture


def drawn(shares, sharpness, bias, seed=0):
    """Return the probabilities of a teacher that prefers some classes, (N, M), and the true labels,
    (N,).
    """
    random = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(shares)), torch.tensor(shares))
    logits = torch.randn(len(labels), len(shares), generator=random)
    logits[torch.arange(len(labels)), labels] += 2
    return (sharpness * (logits + torch.tensor(bias))).softmax(dim=1), labels


@pytest.mark.parametrize("sharpness", [0.01, 1.0, 20.0])
@pytest.mark.parametrize(
    ("shares", "bias"),
    [([900, 100], [2.0, 0.0]), ([500, 300, 200], [0.0, 3.0, 0.0]), ([400] * 3, [0.0, 0.0, 0.0])],
)
def test_each_class_is_labelled_as_often_as_requested(shares, bias, sharpness):
    probabilities, labels = drawn(shares, sharpness, bias)
    adjusted = at_shares(probabilities, share_offsets(probabilities, labels.bincount()))
    said = adjusted.argmax(dim=1)
    assert (said.bincount(minlength=len(shares)) - torch.tensor(shares)).abs().max() <= 2
    assert torch.allclose(adjusted.sum(dim=1), torch.ones(len(labels), dtype=torch.float64))

    def recall(found):
        return torch.stack(
            [(found[labels == m] == m).double().mean() for m in range(len(shares))]
        ).mean()

    assert recall(said) >= recall(probabilities.argmax(dim=1)) - 0.01


def test_a_class_that_was_not_requested_is_never_a_label():
    probabilities = torch.tensor([[0.9, 0.1]]).repeat(500, 1) + 0.05 * torch.rand(500, 1)
    said = at_shares(probabilities, share_offsets(probabilities, torch.tensor([0, 500]))).argmax(
        dim=1
    )
    assert (said == 1).all()


def a_teacher(classes=3):
    """Return a teacher of 8×8 images that predicts the brightest of `classes` stripes."""
    shape = (1, 8, 8)
    features = ProjectedFeatures("pixels", shape, 64)
    features.directions.copy_(torch.eye(64))
    stripes = torch.zeros(8, 8, classes)
    for label in range(classes):
        stripes[:, 2 * label : 2 * label + 2, label] = 4.0
    return TeacherNetwork.of(features, stripes.flatten(0, 1))


def test_released_images_get_the_teachers_labels_by_shares():
    images = torch.zeros(60, 1, 8, 8)
    truth = torch.arange(60) % 3
    for label in range(3):
        images[truth == label, :, :, 2 * label : 2 * label + 2] = 0.8
    asked = np.roll(truth.numpy(), 1)  # the model drew other classes than requested
    found = relabelled(a_teacher(), ImageSet(as_uint8(images), asked, ("a", "b", "c")))
    assert np.array_equal(found.labels, truth.numpy())
    assert np.array_equal(np.bincount(found.labels), np.bincount(asked))


def test_a_guided_draw_is_more_like_its_labels_to_the_teacher():
    torch.manual_seed(0)
    model = UNet(8, 1, 3, Architecture(width=8, multipliers=(1, 1)))
    teacher = a_teacher()
    labels = torch.arange(60) % 3

    def agreement(guide):
        drawn = torch.cat(
            [
                *model.drawing(
                    labels, Sampling(steps=6, guide=guide), torch.Generator().manual_seed(0)
                )
            ]
        )
        return probabilities_of(teacher, drawn)[torch.arange(60), labels].mean()

    alone = agreement(None)
    some = agreement(guide_by(teacher, 1.0))
    more = agreement(guide_by(teacher, 4.0))
    assert alone < some < more
    assert agreement(guide_by(teacher, 0.0)) == pytest.approx(float(alone), abs=1e-6)
