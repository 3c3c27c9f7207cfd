"""`stage auxiliary`: the one-step generator that a release of features teaches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sfumato.baselines.feta_sampler import new_sampled
from sfumato.generators.gaussian import fit_gaussians, public_details
from sfumato.generators.one_step import Match, OneStep, fit_generator, new_generator, save_drawing
from sfumato.queries.count import read_counts
from sfumato.queries.covariance import load_covariance
from sfumato.queries.frequency import load_embedding
from sfumato.queries.moments import load_moments
from sfumato.runtime.compute import device
from sfumato.settings.training import Auxiliary
from stages.runner import StageRun, progress


def auxiliary(run: StageRun[Auxiliary]) -> None:
    plan, settings = run.plan, run.settings
    priors = read_counts(run.inputs["count"], plan.size_hint, len(plan.classes)).priors
    if settings.target == "covariance":
        details = public_details(run.path("public"), plan.shape, plan.seed) if settings.details else None
        generator: OneStep = fit_gaussians(load_covariance(run.path("covariance")), priors, details)
    else:
        generator = fitted(run, priors)
    with run.writing() as directory:
        save_drawing(generator, settings.images, priors, plan.classes, plan.seed + 1, directory)


def fitted(run: StageRun[Auxiliary], priors: Tensor) -> OneStep:
    plan, settings = run.plan, run.settings
    if settings.target == "moments":
        target, features = load_moments(run.path("moments"), plan.shape)
    else:
        target, features = load_embedding(run.path("frequency"))
    if settings.network == "denoiser":
        generator: Any = new_sampled(plan.shape, len(plan.classes), settings.width, plan.seed)
    else:
        generator = new_generator(plan.shape, len(plan.classes), settings.latent, settings.width, plan.seed)
    with progress("auxiliary") as report:
        return fit_generator(generator, [Match(target.to(device()), features)], settings, priors, plan.seed, report)
