"""`stage evolve`: let sensitive images vote, in several rounds, for images of a public renderer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sfumato.settings.stage import QUERY, Stage

if TYPE_CHECKING:
    from sfumato.baselines.settings import Evolve
    from sfumato.planning.checks import Problems, Setup
    from stages.runner import QueryRun


def evolve(run: QueryRun, settings: Evolve) -> None:
    from sfumato.baselines.private_evolution import (
        RendererGenerator,
        distance_features,
        query_evolve,
        save_population,
    )
    from sfumato.queries.feature_means import encoder_of
    from sfumato.runtime.compute import device
    from stages.feature_means import encoded
    from stages.screen import progress, say

    plan = run.plan
    generator = RendererGenerator(settings.generator, plan.shape)
    embedding = distance_features(settings, plan.shape, generator, plan.seed).to(device())
    latents = encoded(run, embedding, encoder_of(embedding, embedding.config()))
    priors = run.counts.priors
    released = f"{settings.rounds} rounds of votes for candidates of {settings.generator}"
    open_charge = partial(
        run.open_charge, released, "1: an image votes for one candidate", 1.0, latents=latents
    )
    with progress("evolve", clock=False) as report:
        charge, population, log = query_evolve(
            open_charge, settings, generator, embedding, priors, plan.seed, report=report, say=say
        )
    with run.releasing(charge) as directory:
        save_population(generator, population, log, plan.classes, directory)


def problems(setup: Setup) -> Problems:
    population = setup.params.evolve.population
    classes = len(setup.card.classes)
    if population < classes:
        yield f"evolve.population={population} is below the number of classes, {classes}: raise it"


STAGE = Stage(
    "evolve",
    QUERY,
    "In each round, release noisy votes of the sensitive images for candidate images from a public "
    "renderer; keep the candidates of the last round.",
    "sfumato.baselines.settings:Evolve",
    evolve,
    inputs=("count",),
    seeded=True,
    one_process=True,
    gives="images",
    problems=problems,
)
