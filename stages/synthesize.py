"""`stage synthesize`: the release — images and labels drawn from the models that the privacy budget bought."""

from __future__ import annotations

from sfumato.data.tables import check_parquet
from sfumato.features.teacher_network import guide_by, load_teacher
from sfumato.release.exports import PUBLIC_SOURCE
from sfumato.release.release import save_release
from sfumato.release.synthesis import draw_mixture
from sfumato.release.variation import vary
from sfumato.runtime.compute import device
from sfumato.settings.release import Synthesize
from sfumato.storage.artifacts import declared_apart, merge_records
from stages.runner import StageRun
from stages.screen import progress


def synthesize(run: StageRun[Synthesize]) -> None:
    plan, settings = run.plan, run.settings
    if "parquet" in settings.export:
        check_parquet()  # before anything slow
    paths = {name: artifact.path for name, artifact in run.inputs.items()}
    counts = run.counts
    priors = counts.priors if settings.labels == "prior" else None
    teacher = load_teacher(paths["teacher"]).to(device()) if settings.reads("teacher") else None
    guide = guide_by(teacher, settings.teacher_guidance) if teacher and settings.teacher_guidance else None
    with progress("synthesize") as report:
        folder = run.out.parent
        images, labels, sources = draw_mixture(paths, settings, priors, plan.seed, report, plan.shape, guide, folder)
    varied = vary(images, labels, settings, teacher, plan.seed, sources == PUBLIC_SOURCE)
    with run.writing() as directory:
        inputs = list(run.inputs.values())
        save_release(directory, varied, sources, merge_records(inputs), plan, declared_apart(inputs))
