"""The cosine transform is a rotation, and rows have norm 1 at most. With `flip`, an image and its
mirror image have the same row.
"""

import pytest
import torch

from sfumato.features.cosine import CosineMoments

SHAPE = (3, 16, 16)


def test_coefficients_are_a_rotation_of_the_image():
    features = CosineMoments(SHAPE, 9, 4, 0.3, 0.7, False)
    images = torch.rand(5, *SHAPE, generator=torch.Generator().manual_seed(0))
    found = features.coefficients(images)
    torch.testing.assert_close(found.norm(dim=1), (images - 0.5).flatten(1).norm(dim=1))
    torch.testing.assert_close(features.images(found), images)
    # A grey image has only one coefficient that is not zero: its mean brightness
    plain = features.coefficients(torch.full((1, *SHAPE), 0.75))
    assert plain.abs().argmax() == 0 and plain[0, 1:].abs().max() < 1e-5


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 16, 16), (3, 12, 20)])
def test_no_row_is_longer_than_one(shape, flip):
    features = CosineMoments(shape, 12, 5, 0.2, 0.7, flip)
    random = torch.Generator().manual_seed(0)
    extremes = torch.stack(
        [torch.zeros(shape), torch.ones(shape), (torch.rand(shape, generator=random) > 0.5).float()]
    )
    rows = features(torch.cat([extremes, torch.rand(20, *shape, generator=random)])).double()
    assert rows.shape[1] == features.size
    assert rows.norm(dim=1).max() <= 1 + 1e-6
    if not flip:
        # These rows are clipped, so they have the largest norm
        torch.testing.assert_close(rows[:2].norm(dim=1), torch.ones(2).double())


def test_a_mirror_image_has_the_same_row():
    features = CosineMoments(SHAPE, 20, 6, 0.3, 0.7, True)
    images = torch.rand(8, *SHAPE, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(features(images), features(images.flip(3)))
    other = CosineMoments(SHAPE, 20, 6, 0.3, 0.7, False)
    assert features.size < 0.6 * other.size and not torch.allclose(
        other(images), other(images.flip(3)), atol=1e-3
    )
