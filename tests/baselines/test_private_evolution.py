"""In each round of Private Evolution, an image has one vote. T rounds cost as much as one Gaussian
mechanism with μ = √T/σ, even if the run is killed and resumed.
"""

import math

import pytest
import torch
from safetensors.torch import load_file

from sfumato.baselines.private_evolution import (
    RendererGenerator,
    distance_features,
    nearest_votes,
    on_grid,
    query_evolve,
)
from sfumato.baselines.settings import Evolve
from sfumato.data.store import LatentSet
from sfumato.features.batch_invariant import rows_alone
from sfumato.privacy.accountant import epsilon
from sfumato.privacy.checkpoint import checkpoint_path
from sfumato.privacy.events import Mechanism
from sfumato.privacy.rows import bounded_sum

CLASSES = 10
SHAPE = (1, 8, 8)
DELTA = 1e-5
UNIFORM = torch.full((CLASSES,), 1 / CLASSES)


@pytest.fixture(scope="module")
def generator() -> RendererGenerator:
    return RendererGenerator("glyphs", SHAPE)


@pytest.fixture(scope="module")
def places(generator, digits):
    """Return 90 digits in a real embedding, their classes, 124 candidates, and their classes."""
    settings = Evolve(population=124)
    embedding = distance_features(settings, SHAPE, generator, seed=0)
    images, labels = digits.batch(range(90))
    kinds = torch.arange(124) % generator.kinds
    genes = generator.draw(len(kinds), torch.Generator().manual_seed(1))
    candidates = embedding(generator.images(kinds, genes)).detach()
    return rows_alone(embedding, images), labels, candidates, torch.arange(124) % CLASSES


def histogram(vectors, labels, candidates, candidate_labels):
    return bounded_sum(nearest_votes(candidates, candidate_labels, CLASSES, vectors, labels), 1.0)


def test_one_image_moves_the_votes_by_exactly_its_own(places):
    vectors, labels, candidates, classes = places
    whole = histogram(vectors, labels, candidates, classes)
    assert whole.sum() == len(vectors)
    for left_out in range(0, 90, 7):
        kept = torch.arange(90) != left_out
        move = whole - histogram(vectors[kept], labels[kept], candidates, classes)
        assert sorted(move.unique().tolist()) == [0.0, 1.0] and move.sum() == 1
        row, column = (int(index) for index in move.nonzero()[0])
        assert row == labels[left_out] == classes[column]


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_votes_do_not_depend_on_batches_or_order(places, scale):
    """The votes are equal even for candidates that differ only in the last bit.

    Distances are exact sums of whole numbers, so batches and order cannot change which is nearest.
    """
    vectors, labels, candidates, classes = places
    chance = torch.Generator().manual_seed(0)
    close = candidates.repeat(8, 1) * scale * (1 + 6e-8 * torch.randn(8 * 124, 1, generator=chance))
    own = classes.repeat(8)
    whole = histogram(vectors * scale, labels, close, own)
    alone = sum(
        histogram(vectors[i : i + 1] * scale, labels[i : i + 1], close, own) for i in range(90)
    )
    order = torch.randperm(90, generator=chance)
    assert torch.equal(whole, alone)
    assert torch.equal(whole, histogram(vectors[order] * scale, labels[order], close, own))
    assert on_grid(vectors * scale).abs().max() <= 2**14


def test_the_nearest_candidate_gets_the_vote():
    candidates = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [-1.0, 0.0]])
    vectors = torch.tensor([[0.9, 0.1], [0.1, 0.9], [-3.0, 0.0]])
    same = torch.zeros(4, dtype=torch.int64)
    votes = histogram(vectors, torch.zeros(3, dtype=torch.int64), candidates, same)
    assert votes.nonzero().tolist() == [[0, 0], [0, 1], [0, 3]]
    votes = histogram(vectors, torch.tensor([0, 1, 2]), candidates, torch.tensor([1, 0, 2, 2]))
    assert votes.nonzero().tolist() == [[0, 1], [1, 0], [2, 3]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_long_vector_votes_once_and_a_non_finite_one_never(value):
    vectors = torch.zeros(3, 4)
    candidates = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
    vectors[1, 2] = value
    votes = histogram(
        vectors, torch.zeros(3, dtype=torch.int64), candidates, torch.zeros(5, dtype=torch.int64)
    )
    assert votes.sum() == (3 if math.isfinite(value) else 2) and votes.isfinite().all()
    for label in (-1, CLASSES, 3):  # no class, or a class without candidates
        labels = torch.full((3,), label)
        assert not histogram(vectors, labels, candidates, torch.zeros(5, dtype=torch.int64)).any()


@pytest.mark.parametrize(("sigma", "rounds"), [(4.0, 4), (10.0, 25)])
def test_the_rounds_cost_what_one_gaussian_of_mu_costs(sigma, rounds):
    """T Gaussians with σ over all images cost as much as one with σ/√T, because their Rényi
    divergences are equal: T·α/(2σ²) = α/(2(σ/√T)²).
    """
    assert Evolve(rounds=rounds).sampling(60_000) == (1.0, rounds)
    asked = Mechanism(noise_multiplier=sigma, uses=rounds)
    alone = Mechanism(noise_multiplier=sigma / math.sqrt(rounds))
    for accountant in ("rdp", "pld"):
        costs = [epsilon([mechanism.event], DELTA, accountant) for mechanism in (asked, alone)]
        assert costs[0] == pytest.approx(costs[1], rel=2e-3)


def evolved(owner, generator, settings, charges, stop=None, say=lambda text: None):
    """Run the query on the prepared digits.

    stop: round after which the run is stopped; charges: list to which opened charges are appended.
    """
    embedding = distance_features(settings, SHAPE, generator, seed=0)

    def open_charge():
        mechanism = Mechanism(noise_multiplier=2.0, sample_rate=1.0, uses=settings.rounds)
        charge = owner.open(mechanism, stage="evolve")
        drawn = charge._images
        images, labels = drawn.batch(range(len(drawn)))
        charge._images = LatentSet(
            rows_alone(embedding, images, False).half().numpy(), labels.numpy(), drawn.classes
        )
        charges.append(charge)
        return charge

    def report(done, total):
        if done == stop:
            raise KeyboardInterrupt

    return query_evolve(
        open_charge, settings, generator, embedding, UNIFORM, 0, report=report, say=say
    )


def test_a_stopped_run_resumes_after_its_last_round(owner, generator):
    settings = Evolve(rounds=4, population=124, images=50)
    charges = []
    said = []
    with pytest.raises(KeyboardInterrupt):
        evolved(owner, generator, settings, charges, stop=2)
    first = charges[0]
    kept = checkpoint_path(first.run, 2)
    assert [path.name for path in first.run.iterdir() if path.name != "lock"] == [kept.name]
    tensors = load_file(kept)
    assert {name: len(tensor) for name, tensor in tensors.items()} == dict.fromkeys(
        ("genes", "kinds", "labels"), 124
    )
    first._lock.close()
    charge, population, log = evolved(owner, generator, settings, charges, say=said.append)
    assert charge.run == first.run and charge.used == charge.uses == 4
    assert said == [f"evolve: resuming run {charge.run.name[:8]} after round 2, at no further cost"]
    assert len(owner.odometer.opened()) == 1
    assert len(population.labels) == 50 and [row["round"] for row in log] == [1, 2, 3, 4]
