"""Private Evolution: sensitive images vote for candidates of a public renderer, in rounds.

Each round releases votes once, and the next candidates are computed from these votes at no further
cost. So T rounds with the noise multiplier σ cost as much as one Gaussian mechanism with σ/√T.

Source: Lin et al. 2024 (PE); Lin et al. 2025 (Sim-PE, renderers).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sfumato.baselines.settings import Evolve
from sfumato.data.images import ImageSet, Shape, as_uint8, save_images
from sfumato.data.rendered import DRAWN
from sfumato.data.rendered.genes import Genes
from sfumato.features.projection import FEATURE_BATCH, ProjectedFeatures
from sfumato.generators.one_step import balanced_labels
from sfumato.privacy.charge import Charge
from sfumato.privacy.resume import make_durable, resume
from sfumato.privacy.rows import Rows, one_hot
from sfumato.runtime.progress import Progress, Say, discard, no_progress
from sfumato.storage.digest import digest_of
from sfumato.storage.files import write_csv

GRID_STEPS = 2048  # To compute distances, coordinates are rounded to multiples of 1/GRID_STEPS
BOUND = 8  # To compute distances, coordinates are clipped to [-BOUND, BOUND]


# --- Candidates, and their descendants after a vote. This part reads no sensitive image.


class RendererGenerator:
    """A public renderer that draws an image from a candidate's kind and genes (Sim-PE).

    Genes are numbers in [0, 1), which the renderer reads in place of random numbers.

    kinds: number of kinds, which are the renderer's own classes and may differ from the sensitive
    classes. Descendants of a candidate have the same kind;
    length: n, the number of genes of a candidate. As a trial, 8 images of each kind are rendered,
    and n is the largest number of genes that the renderer read for one image, at most 8192.
    """

    def __init__(self, source: str, shape: Shape) -> None:
        self.shape = shape
        kinds, self.render = DRAWN[source](shape)
        self.kinds = len(kinds)
        self.length = 1
        for kind in range(self.kinds):
            for number in range(8):
                genes = Genes(np.random.default_rng((kind, number)).random(8192))
                self.render(genes, kind)  # type: ignore[arg-type]
                self.length = max(self.length, min(genes.read, 8192))

    def draw(self, count: int, random: torch.Generator) -> Tensor:
        """Draw genes of new candidates: (count, n) float32 in [0, 1)."""
        return torch.rand(count, self.length, generator=random)

    def images(self, kinds: Tensor, genes: Tensor) -> Tensor:
        """Render (N, C, H, W) float32 in [0, 1] from kinds and genes, image by image."""
        images = torch.empty(len(kinds), *self.shape)
        for i, (kind, row) in enumerate(zip(kinds.tolist(), genes.double().numpy(), strict=True)):
            image = self.render(Genes(row), kind)  # type: ignore[arg-type]
            images[i] = torch.from_numpy(image.copy()).permute(2, 0, 1) / 255
        return images


def perturb(genes: Tensor, strength: float, random: torch.Generator) -> Tensor:
    """Add normal noise with the standard deviation `strength` to genes, reflected at 0 and 1."""
    noisy = (genes + strength * torch.randn(genes.shape, generator=random)).remainder(2)
    return torch.where(noisy > 1, 2 - noisy, noisy).clamp(max=1 - 1e-6)


class Population(NamedTuple):
    """N candidates. Each has a sensitive class for which it is proposed, a kind, and genes."""

    labels: Tensor  # (N,) int64
    kinds: Tensor  # (N,) int64
    genes: Tensor  # (N, n) float32


def first_population(
    generator: RendererGenerator, labels: Tensor, random: torch.Generator
) -> Population:
    """Create one new candidate for each of `labels`, (N,) int64.

    Within a class, all kinds get the same number of candidates, up to a difference of one, because
    only the votes will show which kind fits the class.
    """
    kinds = torch.empty_like(labels)
    for label in labels.unique():
        indices = (labels == label).nonzero().flatten()
        kinds[indices] = balanced_labels(len(indices), None, generator.kinds, random)
    return Population(labels, kinds, generator.draw(len(kinds), random))


def parents_of(
    votes: Tensor, labels: Tensor, next_labels: Tensor, threshold: float, random: torch.Generator
) -> Tensor:
    """Choose a parent for each candidate of the next round, (n,) int64.

    The parents are given as indices of the N candidates of this round.

    Within a class, the expected number of children of a candidate is proportional to its votes.
    Systematic resampling is used, so the actual number differs from the expected number by less
    than one. If a class has no votes above the threshold, all its candidates have equal shares of
    the children. If a class has no candidates, the candidates of all classes have equal shares.

    votes: (M, N), noisy votes of each class for each candidate;
    labels: (N,), classes of the candidates;
    next_labels: (n,), classes of the candidates of the next round;
    threshold: votes up to this number count as zero; larger votes count in full.
    """
    parents = torch.empty_like(next_labels)
    for label in next_labels.unique():
        indices = (next_labels == label).nonzero().flatten()
        candidates = (labels == label).double()
        strong = torch.where(votes[label] > threshold, votes[label], 0).double() * candidates
        weights = next(
            (each for each in (strong, candidates) if each.sum() > 0), torch.ones_like(candidates)
        )
        parents[indices] = (
            balanced_labels(len(indices), weights / weights.sum(), len(weights), random)
            .sort()
            .values
        )
    return parents


def descendants(
    population: Population,
    parents: Tensor,
    next_labels: Tensor,
    strength: float,
    random: torch.Generator,
) -> Population:
    """Create the candidates of the next round from their parents.

    For each pair of a parent and a class, the first child is a copy of the parent. All other
    children are variations of the parent, as `perturb` computes them.
    """
    genes = population.genes[parents]
    _, first_children = np.unique(
        torch.stack([parents, next_labels], dim=1).numpy(), axis=0, return_index=True
    )
    later_children = np.delete(np.arange(len(parents)), first_children)
    genes[later_children] = perturb(genes[later_children], strength, random)
    return Population(next_labels, population.kinds[parents], genes)


# --- Votes of the sensitive images.


def on_grid(vectors: Tensor) -> Tensor:
    """Round vectors to multiples of 1/GRID_STEPS, and return them in units of 1/GRID_STEPS.

    The results are bounded whole numbers, in float64, so that every sum of their products is exact.
    """
    return (vectors.double() * GRID_STEPS).round().clamp(-BOUND * GRID_STEPS, BOUND * GRID_STEPS)


def nearest_votes(
    candidates: Tensor, candidate_labels: Tensor, classes: int, vectors: Tensor, labels: Tensor
) -> Rows:
    """Compute votes: each image votes for the nearest candidate of its class.

    candidates: (N, d), vectors of the candidates; candidate_labels: (N,) int64;
    vectors: (B, d), vectors of the images; labels: (B,) int64.

    Returns one row per image: the outer product of its one-hot class, (classes,), and its one-hot
    vote, (N,), with norm 1 at most. Distances are sums of whole numbers, which are exact in any
    order, so the nearest candidate does not depend on other images, the batch or the processor. If
    several candidates are equally near, the first one gets the vote. An image does not vote if its
    vector is not finite, if its class has no candidates, or if its class is out of range.
    """
    finite = vectors.isfinite().all(dim=1)
    image_points = on_grid(torch.where(finite[:, None], vectors, 0))
    candidate_points = on_grid(candidates)
    # (B, N): squared distance of image and candidate, minus the squared norm of the image.
    # This norm is the same for all candidates, so it does not change which one is nearest.
    distances = candidate_points.square().sum(1) - 2 * image_points @ candidate_points.T
    distances = distances.masked_fill(labels[:, None] != candidate_labels, float("inf"))
    lowest, nearest = distances.min(dim=1)
    votes = torch.zeros_like(distances).scatter_(1, nearest[:, None], 1)
    return Rows(one_hot(labels, classes), votes * (finite & lowest.isfinite())[:, None])


def distance_features(
    settings: Evolve, shape: Shape, generator: RendererGenerator, seed: int
) -> ProjectedFeatures:
    """Build the feature map in which distances between images are measured.

    Its centre and directions are fitted to images of candidates drawn only for this purpose. These
    images are public.
    """
    embedding = ProjectedFeatures(settings.feature, shape, settings.dimension)
    kinds = torch.arange(settings.population) % generator.kinds
    public = generator.images(kinds, generator.draw(len(kinds), public_random(seed, "embedding")))
    embedding.fit(public, 0.0, seed)
    return embedding


def public_random(seed: int, *purpose: str | int) -> torch.Generator:
    """Return the public random generator for one purpose.

    purpose: the name of the purpose and, if one name stands for several generators, also a number,
    such as the round. The random numbers depend only on `purpose` and the seed, so a resumed run
    draws the same numbers as a run without interruption.
    """
    return torch.Generator().manual_seed(int(digest_of([seed, *purpose])[:15], 16))


@torch.no_grad()
def query_evolve(
    open_charge: Callable[[], Charge],
    settings: Evolve,
    generator: RendererGenerator,
    embedding: ProjectedFeatures,
    priors: Tensor,
    seed: int,
    *,
    report: Progress = no_progress,
    say: Say = discard,
) -> tuple[Charge, Population, list[dict]]:
    """Run all rounds of Private Evolution, under one charge.

    A round renders the candidates, releases votes for them, and creates the next candidates. A run
    that was killed is resumed. The data stored between rounds depend on sensitive images only
    through noisy votes. After the last round, the population has `settings.images` members.

    open_charge: function that opens a charge. The charge draws vectors that `embedding` computed
    from the sensitive images;
    priors: (M,), share of each class among the candidates, from public or released numbers.

    Returns the charge (all its releases are recorded on disk), the last population, and the public
    log.
    """

    def classes_of(number: int) -> Tensor:
        return balanced_labels(number, priors, len(priors), public_random(seed, "labels", number))

    charge, state, log = resume(open_charge, "evolve", say, "round")
    if state is None:
        population = first_population(
            generator, classes_of(settings.population), public_random(seed, "first")
        )
    else:
        population = Population(**state)

    report(charge.used, charge.uses)
    while charge.used < charge.uses:
        # Release the votes once.
        finished_rounds = charge.used
        parts = generator.images(population.kinds, population.genes).split(FEATURE_BATCH)
        vectors = torch.cat([embedding(part.to(embedding.mean.device)).cpu() for part in parts])
        votes = query_votes(charge, vectors, population.labels, len(priors))

        # Choose the next candidates.
        first, last = settings.variation  # the strength falls by the same factor in each round
        strength = first * (last / first) ** (finished_rounds / max(charge.uses - 1, 1))
        threshold = settings.threshold * charge.noise_multiplier
        next_labels = classes_of(
            settings.images if charge.used == charge.uses else settings.population
        )
        parents = parents_of(
            votes,
            population.labels,
            next_labels,
            threshold,
            public_random(seed, "parents", finished_rounds),
        )
        chance = public_random(seed, "variation", finished_rounds)
        log.append(
            {"round": finished_rounds + 1, "strength": strength, "parents": len(parents.unique())}
        )
        population = descendants(population, parents, next_labels, strength, chance)
        make_durable(charge, population._asdict(), log)
        report(charge.used, charge.uses)
    return charge, population, log


def query_votes(charge: Charge, candidates: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Release the noisy votes of one round, (classes, N) float64.

    candidates, labels: vectors and classes of the candidates, as in `nearest_votes`.
    """
    return charge.sum(
        partial(nearest_votes, candidates, labels, classes), 1.0, size=512, integer=True
    )


def save_population(
    generator: RendererGenerator,
    population: Population,
    log: list[dict],
    classes: tuple[str, ...],
    directory: Path,
) -> None:
    images = generator.images(population.kinds, population.genes)
    save_images(directory, ImageSet(as_uint8(images), population.labels.numpy(), classes))
    columns = {"round": "", "strength": ".4g", "parents": ""}
    write_csv(directory / "log.csv", log, columns)
