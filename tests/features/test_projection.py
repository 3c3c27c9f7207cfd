import pytest
import torch

from sfumato.errors import DataError
from sfumato.features import FEATURES
from sfumato.features.batch_invariant import place_matters, rows_alone
from sfumato.features.projection import ProjectedFeatures
from sfumato.features.public_network import ResNet


@pytest.fixture(scope="module")
def images(digits):
    return digits.batch(range(400))[0]


@pytest.mark.parametrize("feature", sorted(FEATURES))
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 16, 16), (1, 28, 28)])
def test_every_map_gives_finite_rows_with_a_gradient(feature, shape):
    batch = torch.cat([torch.rand(2, *shape), torch.zeros(1, *shape)]).requires_grad_()
    rows = FEATURES[feature](shape)(batch)
    rows.square().sum().backward()
    assert rows.ndim == 2 and rows.isfinite().all() and batch.grad.isfinite().all()
    if feature == "scattering":
        torch.testing.assert_close(
            rows[:2].norm(dim=1), torch.full((2,), rows.shape[1] ** 0.5), rtol=1e-3, atol=0
        )


@pytest.mark.parametrize("feature", sorted(FEATURES))
def test_a_row_of_every_map_is_of_its_image_alone(feature, images):
    """The row that a query adds for one image must not depend on another image."""
    made = FEATURES[feature]((1, 8, 8))
    kept = [0, 1, 2, 4, 5, 6]
    changed = images[:7].clone()
    changed[3] = images[20]  # not the negative, which may have the same row
    rows = made(images[:7])
    others = made(changed)
    torch.testing.assert_close(others[kept], rows[kept], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(others[3], rows[3], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(made(images[:7].flip(0)).flip(0), rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("feature", ["scattering", "deep-scattering"])
def test_scattering_prefers_a_small_shift_to_another_texture(feature):
    torch.manual_seed(0)
    image, other = (
        torch.nn.functional.avg_pool2d(torch.rand(1, 1, 32, 32), 5, 1) for _ in range(2)
    )
    at_home, shifted, another = map(
        FEATURES[feature]((1, 28, 28)), (image, image.roll(1, 3), other)
    )
    assert (at_home - shifted).norm() < 0.6 * (at_home - another).norm()


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_directions_follow_the_variance_scaled_by_its_power(images, power):
    features = ProjectedFeatures("pixels", (1, 8, 8), 6)
    features.fit(images, power, seed=0)
    flat = images.flatten(1)
    centred = flat - flat.mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(flat))
    wanted = values.flip(0)[:6]
    rows = centred @ features.directions
    torch.testing.assert_close(
        rows.var(0, unbiased=False), wanted ** (1 - power), rtol=0.05, atol=0
    )
    assert (
        features.directions.T @ vectors.flip(1)[:, 6:]
    ).abs().max() < 0.2 * features.directions.abs().max()
    torch.testing.assert_close(features(images).norm(dim=1), torch.ones(400))


def test_more_dimensions_than_the_map_has_are_those_it_has(images):
    features = ProjectedFeatures("pixels", (1, 8, 8), 500)
    features.fit(images, 0.5, seed=0)
    assert features.dimension == 64 and features(images[:3]).shape == (3, 64)


BESIDE = [{"map": "pixels", "weight": 3.0}, {"map": "moduli"}]


def test_maps_side_by_side_have_the_shares_of_their_weights(images):
    """Each block is centred and has a fixed norm, for numbers of any size. A row has norm 1 up to
    rounding.
    """
    features = ProjectedFeatures(BESIDE, (1, 8, 8), 500)
    psi = features.fit(images, 0.0, seed=0)
    first, second = features.map(images).split([64, features.map.centre.numel() - 64], dim=1)
    torch.testing.assert_close(first.norm(dim=1), torch.full((400,), 0.75**0.5))
    torch.testing.assert_close(second.norm(dim=1), torch.full((400,), 0.25**0.5))
    pixels = images.flatten(1) - images[:250].flatten(1).mean(0)
    torch.testing.assert_close(first, torch.nn.functional.normalize(pixels, dim=1) * 0.75**0.5)
    torch.testing.assert_close(psi.norm(dim=1), torch.ones(400))
    torch.testing.assert_close(psi, features(images))
    again = ProjectedFeatures(**features.config())
    again.load_state_dict(features.state_dict())
    assert torch.equal(again(images[:5]), features(images[:5]))


def test_directions_are_computed_from_all_blocks(images):
    """The directions capture the scatter of the joint rows, not of each block by itself."""
    features = ProjectedFeatures(BESIDE, (1, 8, 8), 8)
    features.fit(images, 0.0, seed=0)
    rows = features.map(images)
    _, vectors = torch.linalg.eigh((rows - rows.mean(0)).T @ (rows - rows.mean(0)))
    overlap = (features.directions.T @ vectors.flip(1)[:, :8]).square().sum()
    assert overlap > 7.9


def test_an_image_at_a_block_centre_has_a_row_of_norm_one(images):
    """The image equals the centre, so the block is zero before its norm is fixed.

    The result must be neither NaN nor longer than 1.
    """
    features = ProjectedFeatures(BESIDE, (1, 8, 8), 20)
    features.fit(images[:1].expand(40, -1, -1, -1), 0.5, seed=0)
    rows = features(images[:9])
    assert rows.isfinite().all() and rows.norm(dim=1).max() <= 1 + 1e-6


@pytest.mark.parametrize(
    ("feature", "network", "count"),
    [("pixels", None, 1), ("pixels", None, 4), ("classifier", ResNet((1, 8, 8), 3, width=4), 4)],
)
def test_features_are_not_fitted_to_equal_images(images, feature, network, count):
    """With equal images, no direction would be finite, and a query would release only noise."""
    features = ProjectedFeatures(feature, (1, 8, 8), 6, network)
    with pytest.raises(DataError, match=f"fitted to {count} images, because .* are equal"):
        features.fit(images[:1].expand(count, -1, -1, -1), 0.5, seed=0)


def test_fitting_is_fixed_by_its_public_seed(images):
    first, again = (ProjectedFeatures("scattering", (1, 8, 8), 20) for _ in range(2))
    before = torch.random.get_rng_state()
    first.fit(images, 0.5, seed=3)
    again.fit(images, 0.5, seed=3)
    assert torch.equal(first.directions, again.directions) and torch.equal(
        before, torch.random.get_rng_state()
    )


def test_a_function_that_looks_at_its_neighbours_is_found_out(images):
    assert place_matters(
        lambda batch: (batch - batch.mean(0)).flatten(1), (1, 8, 8), torch.device("cpu")
    )
    assert place_matters(lambda batch: batch.flatten(1).cumsum(0), (1, 8, 8), torch.device("cpu"))
    assert not place_matters(lambda batch: batch.flatten(1) * 2, (1, 8, 8), torch.device("cpu"))
    assert rows_alone(lambda batch: (batch - batch.mean(0)).flatten(1), images[:9]).eq(0).all()


def test_a_non_finite_image_gives_nan_and_spoils_no_other(images):
    broken = images[:9].clone()
    broken[4, 0, 0, 0] = float("inf")
    rows = rows_alone(lambda batch: batch.flatten(1).cumsum(1), broken)
    assert rows[4].isnan().all() and rows[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()
    assert rows_alone(lambda batch: batch.flatten(1), images[:0]).shape == (0, 64)
