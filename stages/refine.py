"""`stage refine`: the generator, fitted further to both embeddings and to what the teacher sees, which labels it."""

from __future__ import annotations

from functools import partial

from sfumato.generators.one_step import Match, fit_generator, load_generator, save_drawing
from sfumato.queries.count import read_counts
from sfumato.queries.embedding import load_learned
from sfumato.queries.frequency import load_embedding
from sfumato.queries.teacher import load_teacher, relabelled
from sfumato.runtime.compute import device
from sfumato.settings.training import Refine
from stages.runner import StageRun, progress


def refine(run: StageRun[Refine]) -> None:
    plan, settings = run.plan, run.settings
    teacher = load_teacher(run.path("teacher")).to(device())
    target, features = load_embedding(run.path("frequency"))
    learned, learned_by = load_learned(run.path("embedding"), teacher.features)
    matches = [Match(target.to(device()), features), Match(learned.to(device()), learned_by, settings.weight)]
    priors = read_counts(run.inputs["count"], plan.size_hint, len(plan.classes)).priors
    generator = load_generator(run.path("auxiliary"))
    with progress("refine") as report:
        fit_generator(
            generator, matches, settings, priors, plan.seed + 2, report, teacher=teacher, agreement=settings.agreement
        )
    with run.writing() as directory:
        label = partial(relabelled, teacher)
        save_drawing(generator, settings.images, priors, plan.classes, plan.seed + 3, directory, label)
