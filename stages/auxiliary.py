"""`stage auxiliary`: fit a one-step generator to a release of features."""

from sfumato.data.store import load_public
from sfumato.generators.gaussian import fit_gaussians
from sfumato.generators.one_step import OneStep, fit_generator, new_generator, save_drawing
from sfumato.queries.feature_means import load_means
from sfumato.settings.training import Auxiliary
from stages.runner import StageRun
from stages.screen import progress


def auxiliary(run: StageRun, settings: Auxiliary) -> None:
    plan = run.plan
    priors = run.counts.priors
    means = load_means(settings.target, run.path(settings.target), plan=plan)
    generator: OneStep
    if settings.target == "covariance":
        details = None
        if settings.details:
            details = load_public(run.path("public"), plan.shape).some(5000, plan.seed)
        generator = fit_gaussians(means, priors, details)
    else:
        sizes = len(plan.classes), settings.latent, settings.width
        untrained = new_generator(plan.shape, *sizes, plan.seed, plan.several)
        with progress("auxiliary") as report:
            rows = run.counts.row_means
            generator = fit_generator(untrained, [means], settings, priors, plan.seed, report, row_means=rows)
    with run.writing() as directory:
        save_drawing(generator, settings.images, priors, plan.classes, plan.seed + 1, directory)
