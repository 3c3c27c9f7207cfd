"""`stage auxiliary`: fit a one-step generator to the released class means of features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfumato.settings.stage import FREE, Stage, one_label_only

if TYPE_CHECKING:
    from sfumato.generators.one_step import OneStep
    from sfumato.planning.checks import Problems, Setup
    from sfumato.planning.work import Work
    from sfumato.settings.training import Auxiliary
    from stages.runner import StageRun


def auxiliary(run: StageRun, settings: Auxiliary) -> None:
    from sfumato.generators.gaussian import fit_gaussians
    from sfumato.generators.one_step import Target, fit_generator, new_generator, save_drawing
    from stages.screen import progress

    plan = run.plan
    priors = run.counts.priors
    means = run.means(settings.target)
    generator: OneStep
    if settings.target == "covariance":
        details = None
        if settings.details:
            details = run.public.some(5000, plan.seed)
        generator = fit_gaussians(means, priors, details)
    else:
        sizes = len(plan.classes), settings.latent, settings.width
        untrained = new_generator(plan.shape, *sizes, plan.seed, plan.several)
        with progress("auxiliary") as report:
            rows = run.counts.row_means
            generator = fit_generator(
                untrained, Target([means]), settings, priors, plan.seed, report, rows
            )
    with run.writing() as directory:
        save_drawing(generator, settings.images, priors, plan.classes, plan.seed + 1, directory)


def network_work(workload: Work, block: int) -> int:
    from functools import partial

    import torch

    from sfumato.generators.one_step import new_generator

    settings = workload.params.auxiliary
    build = partial(
        new_generator, workload.shape, workload.classes, settings.latent, settings.width, 0
    )
    return workload.operations(build, (settings.latent,), torch.zeros(1, dtype=torch.int64), block)


def work(workload: Work) -> float:
    from sfumato.generators.one_step import block_of_steps, new_generator

    settings = workload.params.auxiliary
    if settings.target == "covariance":  # no network runs: images are drawn from Gaussians
        return 0.0
    generator = new_generator(workload.shape, workload.classes, settings.latent, settings.width, 0)
    coarsest = max(feature.block for feature in workload.params.frequency.features)
    blocks = block_of_steps(
        [block for block in generator.blocks if block <= coarsest], settings.steps
    )
    costs = {
        block: workload.network("auxiliary", block) + workload.network("frequency", block)
        for block in set(blocks)
    }
    return workload.TRAINING * settings.batch * sum(costs[block] for block in blocks)


def problems(setup: Setup) -> Problems:
    from sfumato.settings.data import SEVERAL

    if setup.card.labels == SEVERAL and setup.params.auxiliary.target == "covariance":
        yield one_label_only("auxiliary.target=covariance")


STAGE = Stage(
    "auxiliary",
    FREE,
    "Fit a generator to noisy statistics of the sensitive images (`frequency`, `moments` or "
    "`covariance`), and draw images from it.",
    "sfumato.settings.training:Auxiliary",
    auxiliary,
    inputs=("frequency", "moments", "covariance", "public", "count"),
    seeded=True,
    revision=2,
    several_labels=True,
    gives="generator",
    network_work=network_work,
    work=work,
    problems=problems,
)
