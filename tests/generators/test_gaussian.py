"""Gaussians fitted to a release have the release's moments, shrunk if the release has noise."""

import math
from types import SimpleNamespace

import pytest
import torch
from small_network import draw_images

from sfumato.features import FeatureMeans
from sfumato.features.cosine import CosineMoments
from sfumato.generators.gaussian import RECOLOURED, fit_gaussians, recolour, shrink_means
from sfumato.generators.one_step import load_generator, save_generator
from sfumato.queries.feature_means import load_means, save_means
from sfumato.settings.training import Auxiliary

SHAPE = (3, 16, 16)


def release(clouds: tuple[torch.Tensor, torch.Tensor], deviation: float, classes: int = 2):
    images, labels = clouds
    features = CosineMoments(SHAPE, 20, 6, bound=0.5, products=0.7, flip=False)
    table = (
        features(images).double().T
        @ torch.nn.functional.one_hot(labels, classes).double()
        / len(images)
    )
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(0)) * deviation
    return FeatureMeans((table + noise).float(), features, deviation)


@pytest.fixture(scope="module")
def clouds() -> tuple[torch.Tensor, torch.Tensor]:
    """Return smooth images of two classes, bright above or bright on the left, and labels."""
    random = torch.Generator().manual_seed(1)
    coarse = torch.randn(4000, 3, 4, 4, generator=random) * 0.08
    images = 0.5 + torch.nn.functional.interpolate(coarse, SHAPE[1:], mode="bicubic")
    labels = torch.arange(4000) % 2
    images[labels == 0, :, :8] += 0.15
    images[labels == 1, :, :, :8] += 0.15
    return images.clamp(0, 1), labels


def test_moments_equal_the_coefficients_moments(clouds):
    images, labels = clouds
    found = release(clouds, 0.0)
    means, seconds = found.features.moments(found.table.double().T * 2)
    known = found.features.coefficients(images)[:, found.features.chosen].double()
    for label in (0, 1):
        own = known[labels == label]
        torch.testing.assert_close(means[label], own.mean(0), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(seconds[label], own.T @ own / len(own), atol=1e-3, rtol=1e-3)


def test_what_is_drawn_has_the_moments_of_its_class(clouds):
    images, labels = clouds
    generator = fit_gaussians(release(clouds, 0.0), torch.tensor([0.5, 0.5]))
    drawn, own = draw_images(generator, 4000)
    assert drawn.shape == images.shape and drawn.min() >= 0 and drawn.max() <= 1
    for label in (0, 1):
        known, found = (
            generator.features.coefficients(some[where == label])[
                :, generator.features.chosen
            ].mean(0)
            for some, where in ((images, labels), (drawn, own))
        )
        torch.testing.assert_close(found, known, atol=0.15, rtol=0.05)
    above = drawn[own == 0][:, :, :8].mean()
    left = drawn[own == 1][:, :, :, :8].mean()
    assert above > 0.6 and left > 0.6
    # The release contains the spread of the images' mean brightness, so drawn images must have
    # nearly the same spread
    assert math.isclose(drawn.mean((1, 2, 3)).std(), images.mean((1, 2, 3)).std(), rel_tol=0.35)


def test_noise_alone_gives_one_gaussian_for_all_classes(clouds):
    generator = fit_gaussians(release(clouds, 3.0), torch.tensor([0.5, 0.5]))
    # With so much noise, the classes' means are nearly equal, and covariances nearly diagonal
    assert (generator.means[0] - generator.means[1]).norm() < 0.5 * generator.features.radius
    covariances = generator.factors @ generator.factors.transpose(1, 2)
    apart = covariances - torch.diag_embed(covariances.diagonal(dim1=1, dim2=2))
    assert apart.abs().max() < 0.25 * covariances.diagonal(dim1=1, dim2=2).max()
    assert torch.isfinite(draw_images(generator, 50)[0]).all()


def test_means_are_shrunk_by_what_noise_explains():
    shares = torch.full((2, 1), 0.5)
    means = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    torch.testing.assert_close(shrink_means(means, torch.zeros(2, 1), shares), means)
    torch.testing.assert_close(shrink_means(means, torch.full((2, 1), 0.25), shares), 0.75 * means)
    torch.testing.assert_close(
        shrink_means(means, torch.full((2, 1), 9.0), shares), torch.zeros(2, 2)
    )


def test_a_class_without_a_share_is_drawn_too(clouds):
    generator = fit_gaussians(release(clouds, 1e-5, classes=3), torch.tensor([0.5, 0.5, 0.0]))
    assert torch.isfinite(draw_images(generator, 60)[0]).all()


def test_finer_frequencies_come_from_public_images(clouds):
    stripes = torch.zeros(1, *SHAPE, dtype=torch.uint8)
    stripes[..., ::2] = 255
    moments = release(clouds, 1e-5)
    plain, striped = (
        fit_gaussians(moments, torch.tensor([0.5, 0.5]), some) for some in (None, stripes)
    )

    def along(generator) -> float:
        """Return the difference in mean brightness between the even and the odd columns of an
        image, averaged over all drawn images.
        """
        drawn = draw_images(generator, 200)[0]
        return float(
            (drawn[..., ::2].mean((1, 2, 3)) - drawn[..., 1::2].mean((1, 2, 3))).abs().mean()
        )

    assert along(striped) > 0.3 > 0.05 > along(plain)


def test_recolouring_keeps_edges_and_nothing_of_the_colours():
    random = torch.Generator().manual_seed(0)
    image = torch.tensor([0.9, 0.5, 0.1])[:, None, None].expand(3, 8, 8).clone()
    image[:, :, 4:] *= 0.3  # an edge
    found = recolour(image.expand(400, 3, 8, 8), torch.rand(400, RECOLOURED, generator=random))
    assert found.min() >= 0 and found.max() <= 1 and torch.isfinite(found).all()
    steps = (found[..., 3] - found[..., 4]).abs().mean((1, 2))
    assert steps.min() > 0.02 and torch.equal(found[..., 0], found[..., 3])
    strongest = found[..., 0].mean(2).argmax(1).bincount(minlength=3)
    assert strongest.min() > 80  # each channel is the strongest in many images
    same = recolour(image[None, :1], torch.full((1, RECOLOURED), 0.5))
    assert same.shape == (1, 1, 8, 8)


def test_a_generator_is_read_as_it_was_written(clouds, tmp_path):
    details = torch.randint(0, 256, (7, *SHAPE), dtype=torch.uint8)
    made = release(clouds, 1e-4)
    save_means("covariance", made, made.features.arguments, tmp_path)
    plan = SimpleNamespace(shape=SHAPE, classes=range(made.table.shape[1]), several=False)
    moments = load_means("covariance", tmp_path, plan=plan)
    assert moments.deviation == 1e-4 and moments.features.arguments["shape"] == SHAPE
    generator = fit_gaussians(moments, torch.tensor([0.5, 0.5]), details)
    save_generator(generator, tmp_path)
    both = (draw_images(made, 30, seed=3) for made in (generator, load_generator(tmp_path)))
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))


def test_details_without_gaussians_are_refused():
    with pytest.raises(ValueError, match="details requires the target covariance"):
        Auxiliary(details=True)
    assert Auxiliary(target="covariance").reads("covariance") and not Auxiliary(
        target="covariance"
    ).reads("frequency")
    assert Auxiliary(target="covariance", details=True).reads("public") and not Auxiliary().reads(
        "public"
    )
