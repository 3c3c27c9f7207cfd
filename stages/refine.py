"""`stage refine`: fit the generator further, to the embeddings and to the teacher's labels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sfumato.settings.stage import FREE, Stage

if TYPE_CHECKING:
    from sfumato.planning.checks import Problems, Setup
    from sfumato.planning.work import Work
    from sfumato.settings.training import Refine
    from stages.runner import StageRun


def refine(run: StageRun, settings: Refine) -> None:
    from sfumato.features.teacher_network import relabelled
    from sfumato.generators.one_step import Target, fit_generator, load_generator, save_drawing
    from stages.screen import progress

    plan = run.plan
    teacher = run.teacher
    releases = [run.means("frequency")]
    if run.inputs["embedding"].enabled:
        embedding = run.means("embedding", teacher.features)
        releases.append(replace(embedding, weight=2.0))  # `frequency` has weight 1
    priors = run.counts.priors
    generator = load_generator(run.path("auxiliary"))
    with progress("refine") as report:
        fit_generator(generator, Target(releases, teacher), settings, priors, plan.seed + 2, report)
    with run.writing() as directory:
        label = partial(relabelled, teacher)
        save_drawing(
            generator, settings.images, priors, plan.classes, plan.seed + 3, directory, label
        )


def work(workload: Work) -> float:
    settings = workload.params.refine
    cost = (
        workload.network("auxiliary") + workload.network("frequency") + workload.network("teacher")
    )
    if workload.params.runs("embedding"):
        cost += workload.network("embedding") + workload.network("teacher")
    return workload.TRAINING * settings.steps * settings.batch * cost


def problems(setup: Setup) -> Problems:
    if setup.params.auxiliary.target == "covariance":
        yield (
            "refine requires a generator network, but auxiliary.target=covariance does not train "
            "one: remove refine from run, or change auxiliary.target"
        )


STAGE = Stage(
    "refine",
    FREE,
    "Fit the generator further, to the released embeddings and to the teacher's labels, and draw "
    "images from it.",
    "sfumato.settings.training:Refine",
    refine,
    inputs=("auxiliary", "frequency", "embedding", "teacher", "count"),
    optional=("count", "embedding"),
    seeded=True,
    revision=2,
    gives="generator",
    work=work,
    problems=problems,
)
