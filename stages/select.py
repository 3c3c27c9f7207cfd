"""`stage select`: select public images by the noisy votes for their classes, or by the teacher."""

from sfumato.data.store import load_public
from sfumato.features.teacher_network import classify, load_teacher
from sfumato.runtime.compute import device
from sfumato.settings.training import Select
from sfumato.training.selection import read_votes, relabel, save_selection, save_surest, select_public, surest
from stages.runner import StageRun


def select(run: StageRun, settings: Select) -> None:
    images = load_public(run.path("public"), run.plan.shape)
    classes = run.plan.classes
    if settings.by == "teacher":
        probabilities = classify(load_teacher(run.path("teacher")).to(device()), images).numpy()
        indices, labels = surest(probabilities, max(1, settings.images // len(classes)))
        with run.writing() as directory:
            save_surest(directory, images, probabilities, indices, labels, classes)
        return
    counted = run.inputs["histogram"]
    votes = None
    per_class = False
    if counted.enabled:
        votes, per_class = read_votes(counted.path, images.classes, len(classes))
    kept = select_public(settings, votes, len(images.classes))
    indices, labels = relabel(images.labels, kept, len(images.classes), per_class)
    with run.writing() as directory:
        save_selection(directory, images, kept, indices, labels, classes if per_class else None)
