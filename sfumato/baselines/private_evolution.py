"""Private Evolution: sensitive images vote for the nearest candidates of a public renderer, round after round.

Each round is one release of votes; the next candidates follow from it at no cost. So T rounds cost as much as one
Gaussian of the noise multiplier σ/√T.
Source: Lin et al. 2024 (PE).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfumato.baselines.evolution import (
    Population,
    RendererGenerator,
    descendants,
    first_population,
    parents_of,
    strength_at,
)
from sfumato.data.images import ImageSet, Shape, as_uint8, save_images
from sfumato.features.projection import BATCH, ProjectedFeatures
from sfumato.features.public_network import PublicNetwork
from sfumato.generators.one_step import balanced_labels
from sfumato.privacy.checkpoint import make_durable, resume
from sfumato.privacy.rows import Rows, one_hot
from sfumato.settings.baselines import Evolve
from sfumato.storage.digest import digest_of
from sfumato.storage.files import csv_text

if TYPE_CHECKING:
    from sfumato.privacy.charge import Charge

GRID, BOUND = 2048, 8  # steps of the grid on which nearness is measured, to a unit, and the largest coordinate on it
DIMENSION = 256  # principal directions of the features, at most; unscaled
THRESHOLD = 1.0  # votes up to so many standard deviations of the noise count as none
VARIATION = 0.3, 0.05  # how far genes move, in the first and in the last round


def on_grid(vectors: Tensor) -> Tensor:
    """Vectors as whole numbers, in steps of 1/GRID: float64, so that every sum of their products is exact."""
    return (vectors.double() * GRID).round().clamp(-BOUND * GRID, BOUND * GRID)


def vote_rows(candidates: Tensor, candidate_labels: Tensor, classes: int, vectors: Tensor, labels: Tensor) -> Rows:
    """A one for the nearest candidate of the image's class: (B, classes) ⊗ (B, N), of norm 1 at most.

    Distances are sums of whole numbers, exact in any order: the nearest candidate depends on no other image, no batch
    and no processor. Of equally near ones the first gets the vote. An image does not vote if its vector is not finite,
    or if its class has no candidates or is out of range.

    candidates, vectors: (N, d) and (B, d), in the embedding; candidate_labels, labels: (N,) and (B,) int64.
    """
    finite = vectors.isfinite().all(dim=1)
    where, places = on_grid(torch.where(finite[:, None], vectors, 0)), on_grid(candidates)
    far = places.square().sum(1) - 2 * where @ places.T  # (B, N): the squared distance less the image's own square
    far = far.masked_fill(labels[:, None] != candidate_labels, float("inf"))
    lowest, nearest = far.min(dim=1)
    votes = torch.zeros_like(far).scatter_(1, nearest[:, None], 1)
    return Rows(one_hot(labels, classes), votes * (finite & lowest.isfinite())[:, None])


def embedding_of(
    settings: Evolve, shape: Shape, network: PublicNetwork | None, generator: RendererGenerator, seed: int
) -> ProjectedFeatures:
    """The space of the distances. Its centre and directions are those of new candidates, which are public images.

    network: of the feature "classifier".
    """
    embedding = ProjectedFeatures.through(network, settings.feature, shape, DIMENSION)
    kinds = torch.arange(settings.population) % generator.kinds
    public = generator.images(kinds, generator.draw(kinds, public_random(seed, "embedding")))
    embedding.fit(public, 0.0, seed)
    return embedding


def candidate_labels(priors: Tensor, seed: int, number: int) -> Tensor:
    """The classes of so many candidates, by noisy or public shares, (M,): (number,) int64."""
    return balanced_labels(number, priors, len(priors), public_random(seed, "labels", number))


def public_random(seed: int, *place: str | int) -> torch.Generator:
    """The stream of public randomness for one purpose and round: a resumed run draws what the killed one would have."""
    return torch.Generator().manual_seed(int(digest_of([seed, *place])[:15], 16))


@torch.no_grad()
def query_evolve(
    open_charge: Callable[[], Charge],
    settings: Evolve,
    generator: RendererGenerator,
    embedding: ProjectedFeatures,
    priors: Tensor,
    seed: int,
    *,
    report: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Charge, Population, list[dict]]:
    """All rounds of a charge: candidates, one release of votes, the next candidates. A killed run goes on.

    The charge draws `embedding` of the images. After the last round the population has `settings.images` members. What
    is kept between rounds follows only from noisy votes.

    priors: (M,), the share of each class among the candidates, by public or released numbers.
    Returns: the charge, all of whose uses are on disk, the last population, and the public log.
    """
    charge, state, log = resume(open_charge, "evolve", say, "round")
    if state is None:
        wanted = candidate_labels(priors, seed, settings.population)
        population = first_population(generator, wanted, public_random(seed, "first"))
    else:
        population = Population(*(state[name] for name in ("labels", "kinds", "genes")))

    def embed(images: Tensor) -> Tensor:
        return torch.cat([embedding(part.to(embedding.mean.device)).cpu() for part in images.split(BATCH)])

    report(charge.used, charge.uses)
    while charge.used < charge.uses:
        # one release
        done = charge.used
        images = generator.images(population.kinds, population.genes)
        votes = query_votes(charge, embed(images), population.labels, len(priors))

        # the next candidates
        strength = strength_at(*VARIATION, done, charge.uses)
        threshold = THRESHOLD * charge.noise_multiplier
        last = charge.used == charge.uses
        wanted = candidate_labels(priors, seed, settings.images if last else settings.population)
        parents = parents_of(votes, population.labels, wanted, threshold, public_random(seed, "parents", done))
        chance = public_random(seed, "variation", done)
        log.append({"round": done + 1, "strength": strength, "parents": len(parents.unique())})
        population = descendants(generator, population, parents, wanted, strength, chance)
        make_durable(charge, population.tensors(), log)
        report(charge.used, charge.uses)
    return charge, population, log


def query_votes(charge: Charge, candidates: Tensor, candidate_labels: Tensor, classes: int) -> Tensor:
    """The release of one round: noisy votes, (classes, N) float64. candidates, candidate_labels: as in `vote_rows`."""
    return charge.sum(partial(vote_rows, candidates, candidate_labels, classes), 1.0, size=512, integer=True)


def save_population(
    generator: RendererGenerator, population: Population, log: list[dict], classes: tuple[str, ...], directory: Path
) -> None:
    """Write the last generation as an image set, and a log."""
    images = generator.images(population.kinds, population.genes)
    save_images(directory, ImageSet(as_uint8(images), population.labels.numpy(), classes))
    columns = {"round": "", "strength": ".4g", "parents": ""}
    (directory / "log.csv").write_text(csv_text(log, columns), encoding="utf-8")
