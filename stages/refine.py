"""`stage refine`: fit the generator further, to the embeddings and to the teacher's labels."""

from dataclasses import replace
from functools import partial

from sfumato.features.teacher_network import load_teacher, relabelled
from sfumato.generators.one_step import fit_generator, load_generator, save_drawing
from sfumato.queries.feature_means import load_means
from sfumato.runtime.compute import device
from sfumato.settings.training import Refine
from stages.runner import StageRun
from stages.screen import progress


def refine(run: StageRun, settings: Refine) -> None:
    plan = run.plan
    teacher = load_teacher(run.path("teacher")).to(device())
    releases = [load_means("frequency", run.path("frequency"), plan=plan)]
    if run.inputs["embedding"].enabled:
        learned = load_means("embedding", run.path("embedding"), teacher.features, plan=plan)
        releases.append(replace(learned, weight=2.0))  # `frequency` has weight 1
    priors = run.counts.priors
    generator = load_generator(run.path("auxiliary"))
    with progress("refine") as report:
        # agreement: weight of the teacher's cross-entropy
        fit_generator(generator, releases, settings, priors, plan.seed + 2, report, teacher=teacher, agreement=0.01)
    with run.writing() as directory:
        label = partial(relabelled, teacher)
        save_drawing(generator, settings.images, priors, plan.classes, plan.seed + 3, directory, label)
