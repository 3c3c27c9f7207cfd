"""`stage synthesize`: the release — images and labels drawn from the models that the privacy budget bought."""

from __future__ import annotations

from sfumato.artifacts import merge_records
from sfumato.config import Synthesize
from sfumato.queries.count import read_counts
from sfumato.release.exports import check_parquet
from sfumato.release.release import save_release
from sfumato.release.synthesis import draw_mixture
from stages.runner import StageRun, progress


def synthesize(run: StageRun[Synthesize]) -> None:
    plan, settings = run.plan, run.settings
    if "parquet" in settings.export:
        check_parquet()  # before anything slow
    paths = {name: artifact.path for name, artifact in run.inputs.items()}
    counts = read_counts(run.inputs["count"], plan.size_hint, len(plan.classes))
    priors = counts.priors if settings.labels == "prior" else None
    with progress("synthesize") as report:
        images, labels, sources = draw_mixture(paths, settings, priors, plan.seed, report, plan.shape)
    with run.writing() as directory:
        save_release(directory, images, labels, sources, merge_records(list(run.inputs.values())), plan)
