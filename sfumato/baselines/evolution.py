"""The free part of Private Evolution: candidates from a public generator, and the next ones after a vote (METHODS §13).

Nothing here reads a sensitive image. `sfumato.baselines.private_evolution` asks for the votes.
Source: Lin et al. 2024 (PE); Lin et al. 2025 (Sim-PE, renderers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sfumato.data.images import Shape
from sfumato.data.rendered.genes import DrawnByGenes
from sfumato.diffusion.sampler import renoise, sample
from sfumato.diffusion.unet import UNet
from sfumato.generators.one_step import balanced_labels


class PublicGenerator(Protocol):
    """What proposes candidates. It was made from public data alone.

    kinds: how many classes of its own it has, which need not be the sensitive ones. A candidate is of one kind for
    ever, and has genes, (…) float32, in which it varies.
    """

    kinds: int

    def draw(self, kinds: Tensor, random: torch.Generator) -> Tensor:
        """Genes of new candidates of these kinds, (N,) int64 -> (N, …) float32."""

    def vary(self, kinds: Tensor, genes: Tensor, strength: float, random: torch.Generator) -> Tensor:
        """Genes near those given, of the same shape: at `strength` 0 the same, at 1 hardly related."""

    def images(self, kinds: Tensor, genes: Tensor) -> Tensor:
        """(N, C, H, W) float32 in [0, 1]: a function of kinds and genes, image by image."""


class RendererGenerator:
    """A renderer, whose parameters are the genes: steps of all of them at once, reflected at the ends (Sim-PE)."""

    def __init__(self, source: str, shape: Shape) -> None:
        self.drawn, self.shape = DrawnByGenes(source, shape), shape
        self.kinds = len(self.drawn.classes)

    def draw(self, kinds: Tensor, random: torch.Generator) -> Tensor:
        return torch.rand(len(kinds), self.drawn.length, generator=random)

    def vary(self, kinds: Tensor, genes: Tensor, strength: float, random: torch.Generator) -> Tensor:
        moved = (genes + strength * torch.randn(genes.shape, generator=random)).remainder(2)
        return torch.where(moved > 1, 2 - moved, moved).clamp(max=1 - 1e-6)

    def images(self, kinds: Tensor, genes: Tensor) -> Tensor:
        images = torch.empty(len(kinds), *self.shape)
        for i, (kind, row) in enumerate(zip(kinds.tolist(), genes.double().numpy(), strict=True)):
            images[i] = torch.from_numpy(self.drawn.image(kind, row).copy()).permute(2, 0, 1) / 255
        return images


class NetworkGenerator:
    """A diffusion model that saw public images alone. Genes are the image; variation noises it and denoises it (PE).

    steps: of the solver, for a new image; one that starts from less noise takes fewer. guidance: as for `sample`.
    """

    def __init__(self, model: UNet, steps: int, guidance: float) -> None:
        self.model, self.steps, self.guidance = model, steps, guidance
        self.kinds = model.classes

    def draw(self, kinds: Tensor, random: torch.Generator) -> Tensor:
        return sample(self.model, kinds, self.steps, self.guidance, random, self.model.at_a_time)

    def vary(self, kinds: Tensor, genes: Tensor, strength: float, random: torch.Generator) -> Tensor:
        """The noise level is σ_data · strength / (1 − strength): at ½ as much noise as image."""
        level = self.model.sigma_data * strength / max(1 - strength, 1e-3)
        return renoise(self.model, genes, kinds, level, self.steps, self.guidance, random, self.model.at_a_time)

    def images(self, kinds: Tensor, genes: Tensor) -> Tensor:
        return genes


@dataclass(frozen=True)
class Population:
    """Candidates: the sensitive class that each is proposed for, its kind, its genes; rows of equal number."""

    labels: Tensor  # (N,) int64
    kinds: Tensor  # (N,) int64
    genes: Tensor  # (N, …) float32

    def __len__(self) -> int:
        return len(self.labels)

    def tensors(self) -> dict[str, Tensor]:
        return {"labels": self.labels, "kinds": self.kinds, "genes": self.genes.contiguous()}


def first_population(generator: PublicGenerator, labels: Tensor, random: torch.Generator) -> Population:
    """New candidates for these classes, (N,) int64. In each class all kinds are equally frequent, up to one.

    Which kind suits a class is for the votes to say: a class has as many kinds as it has candidates, at most.
    """
    kinds = torch.empty_like(labels)
    for label in labels.unique():
        own = (labels == label).nonzero().flatten()
        kinds[own] = balanced_labels(len(own), None, generator.kinds, random)
    return Population(labels, kinds, generator.draw(kinds, random))


def looked_at(
    generator: PublicGenerator,
    population: Population,
    embed: Callable[[Tensor], Tensor],
    lookahead: int,
    strength: float,
    random: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """The images of a population, (N, C, H, W), and where they are in the embedding, (N, d).

    With `lookahead`, a candidate stands where the mean of itself and of so many variations is: for what it would
    become, not for itself alone.
    """
    images = generator.images(population.kinds, population.genes)
    total = embed(images)
    for _ in range(lookahead):
        varied = generator.vary(population.kinds, population.genes, strength, random)
        total = total + embed(generator.images(population.kinds, varied))
    return images, total / (1 + lookahead)


def parents_of(
    votes: Tensor, labels: Tensor | None, wanted: Tensor, threshold: float, random: torch.Generator
) -> Tensor:
    """The candidate that each of the next ones descends from: (n,) int64 below N, in proportion to the votes.

    votes: (M, N), noisy; labels: (N,), where a class chooses among its own candidates, or None; wanted: (n,) classes of
    the next ones; threshold: what is below it counts as zero, what is above it in full. A class in which nothing is
    above it takes all its candidates alike, or all there are. Systematic resampling: each gets its share, up to one.
    """
    found = torch.empty_like(wanted)
    for label in wanted.unique():
        places = (wanted == label).nonzero().flatten()
        weights = torch.where(votes[label] > threshold, votes[label], 0).double()
        own = torch.ones_like(weights) if labels is None else (labels == label).double()
        weights = weights * own
        if weights.sum() <= 0:
            weights = own if own.sum() > 0 else torch.ones_like(own)
        found[places] = balanced_labels(len(places), weights / weights.sum(), len(weights), random).sort().values
    return found


def descendants(
    generator: PublicGenerator,
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
