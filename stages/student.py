"""`stage student`: a network trained on what the release's networks draw, which may be shared with it."""

from sfumato.release.student import save_student, train_student
from sfumato.release.teacher import write_card
from sfumato.settings.training import Student
from stages.runner import StageRun
from stages.screen import progress


def student(run: StageRun, settings: Student) -> None:
    release = run.inputs["synthesize"]
    with progress("student") as report:
        network = train_student(release.path, settings, run.plan.seed, report)
    with run.writing() as directory:
        save_student(network, directory)
        write_card(directory, run.plan, release.records, "student.md", release.apart)
