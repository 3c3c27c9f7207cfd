"""The free part of Private Evolution: candidates from a public renderer, and the next ones after a vote.

Nothing here reads a sensitive image. `sfumato.baselines.private_evolution` asks for the votes.
Source: Lin et al. 2024 (PE); Lin et al. 2025 (Sim-PE, renderers).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.data.images import Shape
from sfumato.data.rendered.genes import DrawnByGenes
from sfumato.generators.one_step import balanced_labels


class RendererGenerator:
    """A renderer as the public generator: its parameters are the genes in which a candidate varies (Sim-PE).

    kinds: how many classes of its own it has, which need not be the sensitive ones. A candidate keeps its kind.
    """

    def __init__(self, source: str, shape: Shape) -> None:
        self.drawn, self.shape = DrawnByGenes(source, shape), shape
        self.kinds = len(self.drawn.classes)

    def draw(self, kinds: Tensor, random: torch.Generator) -> Tensor:
        """Genes of new candidates of these kinds, (N,) int64 -> (N, n) float32 in [0, 1)."""
        return torch.rand(len(kinds), self.drawn.length, generator=random)

    def vary(self, kinds: Tensor, genes: Tensor, strength: float, random: torch.Generator) -> Tensor:
        """Genes near those given: normal steps of all of them, reflected at the ends. At `strength` 0 the same."""
        moved = (genes + strength * torch.randn(genes.shape, generator=random)).remainder(2)
        return torch.where(moved > 1, 2 - moved, moved).clamp(max=1 - 1e-6)

    def images(self, kinds: Tensor, genes: Tensor) -> Tensor:
        """(N, C, H, W) float32 in [0, 1]: a function of kinds and genes, image by image."""
        images = torch.empty(len(kinds), *self.shape)
        for i, (kind, row) in enumerate(zip(kinds.tolist(), genes.double().numpy(), strict=True)):
            images[i] = torch.from_numpy(self.drawn.image(kind, row).copy()).permute(2, 0, 1) / 255
        return images


@dataclass(frozen=True)
class Population:
    """Candidates: the sensitive class that each is proposed for, its kind, its genes; rows of equal number."""

    labels: Tensor  # (N,) int64
    kinds: Tensor  # (N,) int64
    genes: Tensor  # (N, …) float32

    def tensors(self) -> dict[str, Tensor]:
        return {"labels": self.labels, "kinds": self.kinds, "genes": self.genes.contiguous()}


def first_population(generator: RendererGenerator, labels: Tensor, random: torch.Generator) -> Population:
    """New candidates for these classes, (N,) int64. In each class all kinds are equally frequent, up to one.

    The votes decide which kind fits a class.
    """
    kinds = torch.empty_like(labels)
    for label in labels.unique():
        own = (labels == label).nonzero().flatten()
        kinds[own] = balanced_labels(len(own), None, generator.kinds, random)
    return Population(labels, kinds, generator.draw(kinds, random))


def parents_of(votes: Tensor, labels: Tensor, wanted: Tensor, threshold: float, random: torch.Generator) -> Tensor:
    """The candidate that each of the next ones descends from: (n,) int64 below N, in proportion to the votes.

    Systematic resampling: each gets its share, up to one. A class in which nothing is above the threshold takes all its
    candidates alike, or all of any class if it has none.

    votes: (M, N), noisy; labels: (N,), the classes of the candidates; wanted: (n,), the classes of the next ones;
    threshold: votes up to it count as zero, votes above it in full.
    """
    found = torch.empty_like(wanted)
    for label in wanted.unique():
        places = (wanted == label).nonzero().flatten()
        own = (labels == label).double()
        weights = torch.where(votes[label] > threshold, votes[label], 0).double() * own
        if weights.sum() <= 0:
            weights = own if own.sum() > 0 else torch.ones_like(own)
        found[places] = balanced_labels(len(places), weights / weights.sum(), len(weights), random).sort().values
    return found


def descendants(
    generator: RendererGenerator,
    population: Population,
    parents: Tensor,
    wanted: Tensor,
    strength: float,
    random: torch.Generator,
) -> Population:
    """The next candidates: of each parent the first is itself, all further ones are variations of it."""
    kinds, genes = population.kinds[parents], population.genes[parents]
    pairs = torch.stack([parents, wanted], dim=1)
    order = torch.arange(len(pairs))
    _, group = pairs.unique(dim=0, return_inverse=True)
    earliest = torch.full((int(group.max()) + 1,), len(pairs)).scatter_reduce(0, group, order, "amin")
    again = (earliest[group] != order).nonzero().flatten()
    genes[again] = generator.vary(kinds[again], genes[again], strength, random)
    return Population(wanted, kinds, genes)


def strength_at(first: float, last: float, round: int, rounds: int) -> float:
    """How far variations go in a round, counted from 0: from `first` to `last`, falling by a constant factor."""
    return first * (last / first) ** (round / max(rounds - 1, 1))
