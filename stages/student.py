"""`stage student`: train a classifier on images that the release's networks draw.

The classifier may be shared with the release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfumato.settings.stage import FREE, Stage
from stages.synthesize import drawing_work

if TYPE_CHECKING:
    from sfumato.planning.checks import Problems, Setup
    from sfumato.planning.work import Work
    from sfumato.settings.training import Student
    from stages.runner import StageRun


def student(run: StageRun, settings: Student) -> None:
    from sfumato.release.student import save_student, train_student
    from sfumato.release.teacher import write_card
    from stages.screen import progress

    release = run.inputs["synthesize"]
    with progress("student") as report:
        network = train_student(release.path, settings, run.plan.seed, report)
    with run.writing() as directory:
        save_student(network, directory)
        write_card(directory, run.plan, release.records, "student.md")


def network_work(workload: Work, block: int) -> int:
    from functools import partial

    from sfumato.features.public_network import build_network

    build = partial(
        build_network, "residual", workload.shape, workload.classes, workload.params.student.width
    )
    return workload.operations(build, workload.shape)


def work(workload: Work) -> float:
    settings = workload.params.student
    drawing = workload.params.synthesize.model_copy(update={"herding": 1})
    each = workload.TRAINING * workload.network("student") + 1.25 * drawing_work(workload, drawing)
    return settings.steps * settings.batch * each


def problems(setup: Setup) -> Problems:
    if not setup.params.synthesize.stream:
        yield (
            "student trains on images from the networks in the release, but the release contains "
            "none: set synthesize.stream: true, or remove student from run"
        )


STAGE = Stage(
    "student",
    FREE,
    "Train a classifier, which may be shared too, on images that the release's networks draw.",
    "sfumato.settings.training:Student",
    student,
    inputs=("synthesize",),
    seeded=True,
    owned=True,
    several_labels=True,
    network_work=network_work,
    work=work,
    problems=problems,
)
