"""Test the free part of Private Evolution: genes become images, votes choose parents, children vary
around parents.
"""

import pytest
import torch

from sfumato.baselines.private_evolution import (
    Population,
    RendererGenerator,
    descendants,
    first_population,
    parents_of,
    perturb,
)


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module", params=["glyphs", "procedural", "photos"])
def generator(request):
    return RendererGenerator(request.param, (1, 8, 8))


def test_equal_genes_are_equal_images(generator):
    kinds = torch.arange(20) % generator.kinds
    genes = generator.draw(len(kinds), chance())
    images = generator.images(kinds, genes)
    assert (
        images.shape == (20, 1, 8, 8)
        and images.min() >= 0
        and images.max() <= 1
        and images.std() > 0.05
    )
    assert torch.equal(images, generator.images(kinds, genes))
    moves = [
        float((generator.images(kinds, perturb(genes, strength, chance(1))) - images).abs().mean())
        for strength in (0.003, 0.03, 0.3)
    ]
    assert 0 <= moves[0] < moves[1] < moves[2]


@pytest.mark.parametrize("strength", [0.05, 0.9])
def test_varied_genes_stay_within_their_range(strength):
    genes = perturb(torch.rand(500, 20, generator=chance()), strength, chance(1))
    assert genes.min() >= 0 and genes.max() < 1


def test_the_first_candidates_of_a_class_are_of_all_kinds(generator):
    labels = torch.arange(10 * generator.kinds) % 5
    population = first_population(generator, labels, chance())
    for label in range(5):
        counts = population.kinds[labels == label].bincount(minlength=generator.kinds)
        assert counts.min() == counts.max() == 2


def test_parents_come_in_proportion_to_votes_within_a_class():
    votes = torch.tensor([[6.0, 3.0, 1.0, 50.0], [90.0, 0.0, 0.0, 4.0]])
    labels = torch.tensor([0, 0, 0, 1])
    wanted = torch.tensor([0] * 90 + [1] * 10)
    found = parents_of(votes, labels, wanted, 2.0, chance())
    assert found[:90].bincount(minlength=4).tolist() == [60, 30, 0, 0] and (found[90:] == 3).all()
    found = parents_of(votes, labels, wanted, 5.0, chance())
    assert (found[:90] == 0).all()


def test_a_class_below_the_threshold_keeps_its_candidates():
    votes = torch.full((2, 6), -3.0)
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    found = parents_of(votes, labels, torch.tensor([0] * 6 + [1] * 3), 1.0, chance())
    assert found.bincount(minlength=6).tolist() == [2, 2, 2, 1, 1, 1]
    lone = parents_of(
        votes, torch.zeros(6, dtype=torch.int64), torch.ones(6, dtype=torch.int64), 1.0, chance()
    )
    assert lone.sort().values.tolist() == [0, 1, 2, 3, 4, 5]


def test_of_each_parent_the_first_child_is_itself_in_every_class(generator):
    kinds = torch.arange(4) % generator.kinds
    population = Population(
        torch.zeros(4, dtype=torch.int64), kinds, generator.draw(len(kinds), chance())
    )
    parents = torch.tensor([2, 2, 2, 0, 2])
    wanted = torch.tensor([0, 0, 0, 0, 1])
    next_ones = descendants(population, parents, wanted, 0.3, chance(1))
    assert torch.equal(next_ones.kinds, kinds[parents]) and torch.equal(next_ones.labels, wanted)
    same = [
        torch.equal(next_ones.genes[i], population.genes[p]) for i, p in enumerate(parents.tolist())
    ]
    assert same == [True, False, False, True, True]
