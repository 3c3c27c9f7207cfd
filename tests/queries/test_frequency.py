import math
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sfumato.features.fourier import FourierFeatures
from sfumato.privacy.rows import Rows, bounded_sum
from sfumato.queries.feature_means import query_feature_means
from sfumato.settings.queries import FeatureMap
from stages.frequency import record_text

PIXELS = FeatureMap(length_scales=(0.4, 0.2))
SCATTERING = FeatureMap(map="scattering", length_scales=(0.5,), weight=3.0)
BOTH = [PIXELS, SCATTERING]


def random_images(count, shape, seed=0):
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (1, 10, 14)])
@pytest.mark.parametrize("size", [6, 200, 334])
def test_every_row_has_norm_one(shape, size):
    features = FourierFeatures(shape, BOTH, size, seed=1)
    flat = (torch.full((1, *shape), value) for value in (0.0, 1.0, 1e3))
    rows = features(torch.cat([random_images(5, shape), *flat]))
    assert rows.shape == (8, size)
    torch.testing.assert_close(
        rows.double().norm(dim=1), torch.ones(8, dtype=torch.float64), rtol=0, atol=1e-6
    )
    clipped = torch.stack([bounded_sum(Rows(row[None]), 1.0) for row in rows])
    assert (torch.linalg.vector_norm(clipped, dim=1) <= 1).all()


def test_the_seed_rebuilds_the_features():
    images = random_images(3, (1, 8, 8))
    before = torch.get_rng_state()
    first, again, other = (FourierFeatures((1, 8, 8), BOTH, 100, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(first(images), again(images)) and not torch.equal(
        first(images), other(images)
    )
    assert first.state_dict() == {} and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("gaussian", lambda u: torch.exp(-u)), ("rational-quadratic", lambda u: 1 / (1 + u))],
)
def test_the_inner_product_is_a_mean_of_kernels(name, kernel, digits):
    """⟨φ(x), φ(y)⟩ approaches the mean of exp(−u) or 1/(1 + u) over the length-scales ℓ, where
    u = ‖x − y‖²/(2ℓ²d).

    The tolerance is 5 standard errors of a mean of K/2 cosines, with a false-alarm rate below 1e-4
    over all 144 pairs.
    """
    images, _ = digits.batch(range(12))
    rows = FourierFeatures((1, 8, 8), [PIXELS.model_copy(update={"kernel": name})], 20_000, seed=0)(
        images
    )
    squared = torch.cdist(images.flatten(1), images.flatten(1)).square()
    expected = sum(kernel(squared / (2 * scale**2 * 64)) for scale in PIXELS.length_scales) / 2
    assert (rows @ rows.T - expected).abs().max() < 5 * math.sqrt(0.5 / 10_000)


def test_the_record_counts_only_true_fourier_features():
    linear = FeatureMap(kernel="linear")
    counted = {
        (PIXELS,): "40 Fourier features by class",
        (linear,): "64 outputs of public maps by class",
        (PIXELS, linear): "40 Fourier features, 64 outputs of public maps, by class",
    }
    for maps, expected in counted.items():
        features = FourierFeatures((1, 8, 8), maps, 40, seed=0)
        assert record_text(features) == f"joint embedding: {expected}"


def test_weights_share_the_squared_norm():
    features = FourierFeatures((1, 8, 8), BOTH, 300, seed=0)
    # Pixels at length-scale 0.4, pixels at 0.2, and scattering
    squares = features.amplitude.double().square().split([50, 50, 50])
    assert [part.sum().item() for part in squares] == pytest.approx([1 / 8, 1 / 8, 3 / 4])


def test_the_fast_embedding_is_the_sum_of_rows(digits):
    images, labels = digits.batch(range(64))
    features = FourierFeatures((1, 8, 8), BOTH, 100, seed=0)
    onehot = torch.nn.functional.one_hot(labels, 10).float()
    rows = (features(images).double().T @ onehot.double()).float()
    torch.testing.assert_close(features.embed(images, onehot), rows, rtol=0, atol=1e-4)


def test_rows_are_made_where_the_features_are(monkeypatch):
    """The GPU is simulated: only shapes and devices are computed."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr("sfumato.queries.feature_means.place_matters", lambda *_: True)
    with FakeTensorMode():
        features = FourierFeatures((1, 8, 8), BOTH, 40, seed=0).to("cuda")
        images = torch.rand(5, 1, 8, 8)
        labels = torch.zeros(5, dtype=torch.int64)
        vectors = features.vectors(images.to("cuda")).cpu()
        made = []
        for drawn, cached in ((images, False), (vectors, True)):

            def total(rows_of, *_, drawn=drawn, **__):
                made.extend(rows_of(drawn, labels))
                return torch.zeros(1)

            query_feature_means(SimpleNamespace(sum=total), features, 10, 5.0, cached=cached)
        assert [part.device.type for part in made] == ["cuda"] * 4
        assert [part.shape for part in made] == [(5, 40), (5, 10)] * 2
        assert made[2].dtype == torch.float64


def test_a_gradient_reaches_the_images():
    images = random_images(2, (1, 8, 8)).double().requires_grad_()
    features = FourierFeatures((1, 8, 8), BOTH, 20, seed=0).double()
    assert torch.autograd.gradcheck(features, images, eps=1e-6, atol=1e-4)


def test_sizes_that_cannot_be_dealt_are_refused():
    for size in (7, 4):
        with pytest.raises(ValueError, match=r"frequency\.size"):
            FourierFeatures((1, 8, 8), BOTH, size, seed=0)
