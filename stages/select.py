"""`stage select`: the public images that the warm-up sees, by the noisy votes for their classes."""

from __future__ import annotations

from sfumato.config import Select
from sfumato.data.store import load_public
from sfumato.warmup.selection import read_votes, relabel, save_selection, select_public
from stages.runner import StageRun


def select(run: StageRun[Select]) -> None:
    images, classes = load_public(run.path("public"), run.plan.shape), run.plan.classes
    counted = run.inputs["histogram"]
    votes, per_class = read_votes(counted.path, images.classes, len(classes)) if counted.enabled else (None, False)
    kept = select_public(run.settings, votes, len(images.classes))
    indices, labels = relabel(images.labels, kept, len(images.classes), per_class)
    with run.writing() as directory:
        save_selection(directory, images, kept, votes, indices, labels, classes if per_class else None)
