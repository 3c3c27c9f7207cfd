"""Private Evolution: sensitive images vote for the nearest candidates of a public generator, round after round.

Each round is one release of votes; what is proposed next follows from it at no cost. So T rounds cost what one Gaussian
of the noise multiplier σ/√T costs.
Source: Lin et al. 2024 (PE); METHODS §13.
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
    PublicGenerator,
    descendants,
    first_population,
    looked_at,
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
from sfumato.storage.png import save_png, to_grid

if TYPE_CHECKING:
    from sfumato.privacy.charge import Charge

GRID, BOUND = 2048, 8  # steps of the grid on which nearness is measured, to a unit, and the largest coordinate on it
EACH = 2  # candidates of each class that the picture of a round shows


def on_grid(vectors: Tensor) -> Tensor:
    """Vectors as whole numbers, in steps of 1/GRID: float64, so that every sum of their products is exact."""
    return (vectors.double() * GRID).round().clamp(-BOUND * GRID, BOUND * GRID)


def vote_rows(
    candidates: Tensor, candidate_labels: Tensor | None, classes: int, vectors: Tensor, labels: Tensor
) -> Rows:
    """A one for the nearest candidate, in the row of the image's class: (B, classes) ⊗ (B, N), of norm 1 at most.

    candidates: (N, d), where the candidates are in the embedding; candidate_labels: (N,), where an image votes for
    those of its class alone, or None; vectors: (B, d), where the images are; labels: (B,) int64.
    Distances are sums of whole numbers, exact in any order: which candidate is nearest depends on no other image, on no
    batch and on no processor. Of equally near ones the first is voted for. An image with a vector that is not finite,
    of a class that is none, or of one without candidates does not vote.
    """
    finite = vectors.isfinite().all(dim=1)
    where, places = on_grid(torch.where(finite[:, None], vectors, 0)), on_grid(candidates)
    far = places.square().sum(1) - 2 * where @ places.T  # (B, N): the squared distance less the image's own square
    if candidate_labels is not None:
        far = far.masked_fill(labels[:, None] != candidate_labels, float("inf"))
    lowest, nearest = far.min(dim=1)
    votes = torch.zeros_like(far).scatter_(1, nearest[:, None], 1)
    return Rows(one_hot(labels, classes), votes * (finite & lowest.isfinite())[:, None])


def embedding_of(
    settings: Evolve, shape: Shape, network: PublicNetwork | None, generator: PublicGenerator, seed: int
) -> ProjectedFeatures:
    """Where nearness is measured. Its centre and directions are those of new candidates, which are public images.

    network: of the feature "classifier".
    """
    embedding = ProjectedFeatures.through(network, settings.feature, shape, settings.dimension)
    kinds = torch.arange(settings.population) % generator.kinds
    public = generator.images(kinds, generator.draw(kinds, public_random(seed, "embedding")))
    embedding.fit(public, settings.power, seed)
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
    generator: PublicGenerator,
    embedding: ProjectedFeatures,
    priors: Tensor,
    seed: int,
    *,
    report: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Charge, Population, Tensor, list[dict]]:
    """All rounds of a charge: candidates, one release of votes, the next candidates. A killed run goes on.

    The charge draws `embedding` of the images. priors: (M,), the share of each class among the
    candidates, by public or released numbers. After the last round the population has `settings.images` members.
    Returns the charge, all of whose uses are on disk, the last population, what was most voted for in each round,
    (T, EACH · classes, C, H, W) uint8, and the public log. What is kept between rounds follows from noisy votes alone.
    """
    charge, state, log = resume(open_charge, "evolve", say, "round")
    if state is None:
        wanted = candidate_labels(priors, seed, settings.population)
        population, best = first_population(generator, wanted, public_random(seed, "first")), []
    else:
        population = Population(*(state[name] for name in ("labels", "kinds", "genes")))
        best = [*state["best"]]

    def embed(images: Tensor) -> Tensor:
        return torch.cat([embedding(part.to(embedding.mean.device)).cpu() for part in images.split(BATCH)])

    report(charge.used, charge.uses)
    while charge.used < charge.uses:
        # where the candidates are
        done = charge.used
        strength = strength_at(*settings.variation, done, charge.uses)
        ahead = public_random(seed, "lookahead", done)
        images, places = looked_at(generator, population, embed, settings.lookahead, strength, ahead)

        # one release
        own = population.labels if settings.within_class else None
        votes = query_votes(charge, places, own, len(priors))

        # the next candidates
        threshold = settings.threshold * charge.noise_multiplier
        last = charge.used == charge.uses
        wanted = candidate_labels(priors, seed, settings.images if last else settings.population)
        parents = parents_of(votes, own, wanted, threshold, public_random(seed, "parents", done))
        chance = public_random(seed, "variation", done)
        log.append({"round": done + 1, "strength": strength, "parents": len(parents.unique())})
        best.append(most_voted(votes, own, images))
        population = descendants(generator, population, parents, wanted, strength, chance)
        make_durable(charge, {**population.tensors(), "best": torch.stack(best)}, log)
        report(charge.used, charge.uses)
    return charge, population, torch.stack(best), log


def query_votes(charge: Charge, candidates: Tensor, candidate_labels: Tensor | None, classes: int) -> Tensor:
    """The release of one round: noisy votes, (classes, N) float64. candidates, candidate_labels: as in `vote_rows`."""
    return charge.sum(partial(vote_rows, candidates, candidate_labels, classes), 1.0, size=512, integer=True)


def most_voted(votes: Tensor, labels: Tensor | None, images: Tensor) -> Tensor:
    """The EACH candidates of each class with the most noisy votes, class by class: (EACH · M, C, H, W) uint8."""
    rows = []
    for label in range(len(votes)):
        mine = votes[label] if labels is None else torch.where(labels == label, votes[label], float("-inf"))
        found = mine.argsort(descending=True, stable=True)[:EACH]
        shown = images[found[mine[found].isfinite()]]
        rows += [shown, torch.zeros(EACH - len(shown), *images.shape[1:])]
    return torch.cat(rows).mul(255).round().byte()


def save_population(
    generator: PublicGenerator,
    population: Population,
    best: Tensor,
    log: list[dict],
    classes: tuple[str, ...],
    directory: Path,
) -> None:
    """Write the last generation as an image set, a log, and a picture: a row a round, EACH candidates a class."""
    images = generator.images(population.kinds, population.genes)
    save_images(directory, ImageSet(as_uint8(images), population.labels.numpy(), classes))
    save_png(directory / "rounds.png", to_grid(best.flatten(0, 1).float() / 255, best.shape[1]))
    columns = {"round": "", "strength": ".4g", "parents": ""}
    (directory / "log.csv").write_text(csv_text(log, columns), encoding="utf-8")
