"""`stage evolve`: let sensitive images vote for the candidates of a public renderer, in several rounds."""

from functools import partial

from sfumato.baselines.private_evolution import RendererGenerator, embedding_of, query_evolve, save_population
from sfumato.queries.feature_means import encoder_of
from sfumato.runtime.compute import device
from sfumato.settings.baselines import Evolve
from stages.feature_means import encoded
from stages.runner import QueryRun
from stages.screen import progress, say


def evolve(run: QueryRun, settings: Evolve) -> None:
    plan = run.plan
    generator = RendererGenerator(settings.generator, plan.shape)
    embedding = embedding_of(settings, plan.shape, generator, plan.seed).to(device())
    latents = encoded(run, embedding, encoder_of(embedding, embedding.config()))
    priors = run.counts.priors
    released = f"{settings.rounds} rounds of votes for candidates of {settings.generator}"
    open_charge = partial(run.open_charge, released, "1: an image votes for one candidate", 1.0, latents=latents)
    with progress("evolve", clock=False) as report:
        charge, population, log = query_evolve(
            open_charge, settings, generator, embedding, priors, plan.seed, report=report, say=say
        )
    with run.releasing(charge) as directory:
        save_population(generator, population, log, plan.classes, directory)
