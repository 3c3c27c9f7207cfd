"""Whitened patches of textures as filters. With `flip`, a mirrored image has the same row."""

import pytest
import torch

from sfumato.errors import ConfigError
from sfumato.features.fourier import FourierFeatures
from sfumato.features.patches import FILTERS, POOLED_CELLS, SIDE, Patches, whitened_patches
from sfumato.features.projection import ProjectedFeatures
from sfumato.features.teacher_network import TeacherNetwork, load_teacher_network, save_teacher
from sfumato.settings.queries import FeatureMap


def test_whitened_patches_are_uncorrelated_and_ignore_the_mean():
    filters, whiten = (part.flatten(1).double() for part in whitened_patches(1, SIDE))
    assert filters.shape == (FILTERS, SIDE**2) and whiten.shape == (SIDE**2, SIDE**2)
    flat = torch.ones(SIDE**2, dtype=torch.float64)
    assert (filters @ flat).abs().max() < 1e-3 * filters.abs().sum(1).max()
    assert (whiten @ flat).norm() < 1e-3 * whiten.norm()


def test_an_image_that_is_a_patch_matches_its_own_filter():
    filters, whiten = (part.flatten(1).double() for part in whitened_patches(1, SIDE))
    inverse = torch.linalg.pinv(whiten, rtol=1e-3)
    patch = inverse @ inverse.T @ filters[7]  # after whitening, it equals the filter
    image = (0.5 + 0.4 * patch / patch.abs().max()).view(1, 1, SIDE, SIDE).float()
    seen = Patches((1, SIDE, SIDE))
    both, signed = (
        seen(torch.cat([image, 1 - image])).view(2, 2, FILTERS, POOLED_CELLS**2)[..., 0].unbind(1)
    )
    assert both.argmax(1).tolist() == [7, 7] and signed[0].argmax() == 7 and signed[1].argmin() == 7


def test_a_row_is_the_mean_of_mirrored_rows_even_after_saving(tmp_path):
    images = torch.rand(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    features = ProjectedFeatures("patches", (3, 16, 16), 12, flip=True)
    features.fit(images, 0.5, seed=0)
    rows = features(images)
    torch.testing.assert_close(features(images.flip(3)), rows)
    assert not torch.allclose(features.map(images.flip(3)), features.map(images))
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(40))
    teacher = TeacherNetwork.of(features, torch.randn(12, 3))
    save_teacher(teacher, tmp_path)
    torch.testing.assert_close(load_teacher_network(tmp_path)(images), teacher(images))


def test_images_smaller_than_a_patch_have_smaller_patches():
    rows = Patches((3, 4, 5))(torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)))
    assert (
        rows.shape == (2, 2 * FILTERS * POOLED_CELLS**2)
        and rows.isfinite().all()
        and rows.std() > 0
    )


def test_grey_images_of_one_pixel_per_side_are_refused():
    with pytest.raises(ConfigError, match="set a smaller `block`"):
        FourierFeatures((1, 8, 8), [FeatureMap(map="patches", block=8)], 4, seed=0)
