"""What a query returns and says follows from what the charge released: other images, or none, change nothing of it."""

import functools
import math
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sfumato.baselines.evolution import RendererGenerator
from sfumato.baselines.private_evolution import embedding_of, query_evolve
from sfumato.diffusion.unet import UNet
from sfumato.dpsgd.run import State, step
from sfumato.dpsgd.trainable import candidates
from sfumato.features.batch_invariant import PLACES
from sfumato.features.cosine import CosineMoments
from sfumato.features.fourier import FourierFeatures
from sfumato.features.public_network import ResNet
from sfumato.privacy.rows import Rows, bounded_sum
from sfumato.queries.central import query_central
from sfumato.queries.count import query_count
from sfumato.queries.covariance import cosine_moments
from sfumato.queries.embedding import query_embedding
from sfumato.queries.histogram import query_histogram
from sfumato.queries.joint import query_joint_embedding
from sfumato.queries.moments import moment_features
from sfumato.queries.saliency import query_saliency
from sfumato.queries.teacher import query_teacher
from sfumato.settings.baselines import Evolve
from sfumato.settings.dpsgd import Finetune, Saliency
from sfumato.settings.noise_levels import LogNormal
from sfumato.settings.queries import Central, Covariance, FeatureMap, Moments, Teacher

CLASSES = 4
Images = tuple[Tensor, Tensor]


class GivenCharge:
    """Shows a query its images, as a charge does, and releases sums that were fixed before."""

    noise_multiplier, sample_rate = 2.0, 0.5

    def __init__(self, drawn: Images, uses: int = 1) -> None:
        self.images, self.labels = drawn
        self.uses, self.asked = uses, []
        self.run = Path(tempfile.mkdtemp())

    @property
    def used(self) -> int:
        return len(self.asked)

    def durable(self) -> None:
        pass

    def batches(self, size: int, draws: int = 1):
        for start in range(0, len(self.images), size):
            yield self.images[start : start + size], self.labels[start : start + size]

    def sum(self, rows_of, max_norm: float, *, size: int, integer: bool = False, labels_only: bool = False) -> Tensor:
        total: Tensor | float = 0.0
        for images, labels in self.batches(size):
            total = total + bounded_sum(rows_of(images, labels), max_norm)
        blank: Rows = rows_of(self.images.new_zeros(1, *self.images.shape[1:]), torch.tensor([-1]))
        return self.release(bounded_sum(blank, max_norm) * 0 + total, max_norm, integer=integer)

    def release(self, total: Tensor, max_norm: float, *, integer: bool = False) -> Tensor:
        self.asked.append((tuple(total.shape), max_norm, integer, total.clone()))
        random = torch.Generator().manual_seed(len(self.asked))
        return (torch.randn(total.shape, generator=random) * 20).round().to(total.dtype)


FEATURES = FourierFeatures((1, 8, 8), [FeatureMap()], 40, seed=0)
COSINES = cosine_moments(Covariance(frequencies=10), (1, 8, 8))
LEARNED = FourierFeatures((1, 8, 8), [FeatureMap()], 40, seed=1)


def network() -> UNet:
    torch.manual_seed(0)
    model = UNet(8, 1, CLASSES, width=8, multipliers=(1,), attention=(0,))
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.2)
    return model


def classifier() -> ResNet:
    torch.manual_seed(0)
    return ResNet((1, 8, 8), 5, width=4).eval()


def central(charge: GivenCharge, **keys) -> Tensor:
    settings = Central(**{"repeats": 2, **keys})
    return query_central(charge, torch.full((CLASSES,), 30.0).double(), (1, 8, 8), settings)


def teacher(charge: GivenCharge, **keys) -> Tensor:
    charge.images = charge.images.flatten(1)[:, :6]
    settings = Teacher(**{"steps": 5, "learning_rate": 2.0, "ridge": 0.1, "last_rate": 0.5, **keys})
    covariance = torch.diag(torch.arange(1.0, 7.0).double())
    return query_teacher(charge, settings, CLASSES, 50.0, covariance, lambda done, total: None)


def saliency(charge: GivenCharge, **keys) -> dict[str, Tensor]:
    model, settings = network(), Saliency(**{"microbatch_size": 4, **keys})
    random = torch.Generator().manual_seed(1)
    return query_saliency(charge, model, candidates(model, settings.candidates), settings, 50.0, generator=random)


def embedding(charge: GivenCharge) -> Tensor:
    charge.images = charge.images.flatten(1)
    return query_embedding(charge, LEARNED, CLASSES, 50.0)


def moments(charge: GivenCharge) -> Tensor:
    features = moment_features(Moments(), (1, 8, 8), classifier())
    charge.images = charge.images.flatten(1)[:, :1].expand(-1, sum(features.widths))
    return query_embedding(charge, features, CLASSES, 50.0)


@functools.cache
def renderer() -> RendererGenerator:
    return RendererGenerator("photos", (1, 8, 8))


def evolve(charge: GivenCharge) -> dict[str, Tensor]:
    settings = Evolve(rounds=3, population=40, images=30)
    embedding = embedding_of(settings, (1, 8, 8), None, renderer(), seed=0)
    charge.images = charge.images.flatten(1)[:, : embedding.dimension]
    priors = torch.full((CLASSES,), 1 / CLASSES)
    _, population, best, _ = query_evolve(lambda: charge, settings, renderer(), embedding, priors, 0, say=print)
    return {**population.tensors(), "best": best}


QUERIES = {
    "count": (1, lambda charge: query_count(charge, CLASSES)),
    "central mean": (2, central),
    "central mode": (2, lambda charge: central(charge, statistic="mode", bins=4)),
    "frequency": (1, lambda charge: query_joint_embedding(charge, FEATURES, CLASSES, 50.0)),
    "covariance": (1, lambda charge: query_joint_embedding(charge, COSINES, CLASSES, 50.0)),
    "histogram": (1, lambda charge: query_histogram(charge, classifier(), 2)),
    "histogram by class": (1, lambda charge: query_histogram(charge, classifier(), 2, CLASSES)),
    "teacher": (5, teacher),
    "embedding": (1, embedding),
    "saliency": (1, saliency),
    "moments": (1, moments),
    "evolve": (3, evolve),
}
BOUNDS = {name: 1.0 for name in QUERIES} | {
    "central mean": 8.0,
    "central mode": 8.0,
    "histogram": math.sqrt(2),
    "histogram by class": math.sqrt(2),
    "teacher": 1.4142,
}


def images(count: int, seed: int, classes: int = CLASSES) -> Images:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 8, 8, generator=random), torch.randint(classes, (count,), generator=random)


def parts(found: object) -> list[Tensor]:
    return list(found.values()) if isinstance(found, dict) else [found]  # type: ignore[list-item]


# many, one, none; of one class alone; dark, bright and broken ones
OTHERS = {
    "more": images(90, 1),
    "one": images(1, 2),
    "none": images(0, 3),
    "of one class": images(30, 4, classes=1),
    "dark": (torch.zeros(20, 1, 8, 8), torch.zeros(20).long()),
    "broken": (torch.full((3, 1, 8, 8), float("nan")), torch.tensor([-1, 99, 1])),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", QUERIES)
def test_a_query_returns_and_says_what_follows_from_the_release_alone(name, other, capfd, caplog):
    """No realised count divides it, nothing of the clean sum fills it in, and bounds and uses are public."""
    uses, query = QUERIES[name]
    seen = []
    for drawn in (images(40, 0), OTHERS[other]):
        charge = GivenCharge((drawn[0].clone(), drawn[1].clone()), uses)
        found = parts(query(charge))
        seen.append(([entry[:3] for entry in charge.asked], found, (*capfd.readouterr(), caplog.text)))
    (asked, first, said), (asked_other, second, said_other) = seen
    assert asked == asked_other and said == said_other
    assert len(asked) == uses and {bound for _, bound, _ in asked} == {BOUNDS[name]}
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["count", "central mode", "histogram", "histogram by class", "evolve"])
def test_what_counts_is_released_in_whole_numbers(name):
    charge = GivenCharge(images(40, 0), QUERIES[name][0])
    QUERIES[name][1](charge)
    assert all(whole for _, _, whole, _ in charge.asked)


def trace(query, uses: int = 1) -> list[Tensor]:
    """What a query hands over, and what it returns."""
    charge = GivenCharge(images(40, 0), uses)
    found = parts(query(charge))
    return [*(total for *_, total in charge.asked), *found]


def differ(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) != len(other) or any(
        a.shape != b.shape or not torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    "query, keys, base",
    [
        (central, {"repeats": 3}, {}),
        (central, {"pool": 2}, {}),
        (central, {"max_norm": 1.0}, {}),
        (central, {"statistic": "mode"}, {}),
        (central, {"bins": 5}, {"statistic": "mode"}),
        (teacher, {"learning_rate": 3.0}, {}),
        (teacher, {"last_rate": 0.9}, {}),
        (teacher, {"momentum": 0.5}, {}),
        (teacher, {"max_norm": 0.5}, {}),
        (teacher, {"ridge": 0.3}, {}),
        (teacher, {"average": 1.0}, {}),
        (saliency, {"max_norm": 1e-3}, {}),
        (saliency, {"draws": 3}, {}),
        (saliency, {"score": "snip"}, {}),
        (saliency, {"candidates": "matrices"}, {}),
        (saliency, {"noise_levels": LogNormal(mean=1.0)}, {}),
    ],
)
def test_every_key_of_a_query_reaches_it(query, keys, base):
    """A key that is read nowhere, or on the way only, changes neither what is handed over nor what comes back."""
    assert differ(
        trace(lambda charge: query(charge, **base), 5), trace(lambda charge: query(charge, **base, **keys), 5)
    )


def test_the_mean_is_of_pixels_pooled_before_the_clip():
    """Pooling halves the bound only where it averages first: a checkerboard becomes grey, whatever it is clipped to."""
    board = (torch.arange(64).view(8, 8) // 8 + torch.arange(64).view(8, 8)) % 2
    charge = GivenCharge((board[None, None].float(), torch.tensor([0])), 1)
    central(charge, repeats=1, pool=2)
    assert torch.allclose(charge.asked[0][3][0], torch.full((16,), 0.5).double(), atol=1e-6)


@pytest.mark.parametrize(
    "keys",
    [
        {"draws": 3},
        {"flip": True},
        {"crop": 2},
        {"noise_levels": LogNormal(mean=1.0)},
        {"max_grad_norm": 1e-2},
        {"learning_rate": 1e-2},
        {"ema": 0.01},
    ],
)
def test_every_key_of_dpsgd_reaches_its_steps(keys):
    def after(**given) -> list[Tensor]:
        random = torch.Generator().manual_seed(3)
        settings = Finetune(**{"draws": 2, "microbatch_size": 4, **given})
        state = State(network(), settings, public_batch=16.0, autocast=False, generator=random)
        charge = GivenCharge(images(6, 0))
        for _ in range(3):
            step(state, charge)
        return [charge.asked[0][3], *(value for name, value in sorted(state.tensors().items()))]

    assert differ(after(), after(**keys))


@pytest.mark.parametrize("name", ["frequency", "covariance", "histogram"])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_maps_see_sensitive_images_in_batches_of_one_size(monkeypatch, name, count):
    """Kernels round differently for another batch: a row, and a vote in a near tie, would depend on the others."""
    sizes = set()
    for kind in (FourierFeatures, CosineMoments, ResNet):

        def seen(self, images, inner=kind.forward):
            sizes.add(len(images))
            return inner(self, images)

        monkeypatch.setattr(kind, "forward", seen)
    charge = GivenCharge(images(count, 0))
    for matters, size in ((True, 1), (False, PLACES)):
        for query in ("joint", "histogram"):
            monkeypatch.setattr(f"sfumato.queries.{query}.place_matters", lambda *_, matters=matters: matters)
        sizes.clear()
        QUERIES[name][1](charge)
        assert sizes == {size}
