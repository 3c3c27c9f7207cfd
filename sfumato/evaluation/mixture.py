"""Which mixture is released, with public images or without: that whose student agrees with the teacher.

Students, draws and labels follow from what was released and from public images, so the choice is free. No real image
is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sfumato.data.images import ImageSet
from sfumato.evaluation.downstream import fit, schedule_of
from sfumato.features.teacher_network import TeacherNetwork, classify, relabelled
from sfumato.release.exports import PUBLIC_SOURCE
from sfumato.release.variation import Varied
from sfumato.settings.release import Synthesize
from sfumato.training.supervised import logits

STUDENT, STEPS = "cnn", 300  # the classifier of each mixture, and its gradient steps
JUDGES = 1000  # drawn images that the students are compared on
CLOSE = 0.01  # of the agreement on drawn images, that public images may cost
WITH, WITHOUT = "with public images", "without public images"


def mixtures(settings: Synthesize, chosen: int) -> dict[str, Synthesize]:
    """What is released with public images and without. chosen: the number of public images that `select` holds.

    The former has them all, unless there are more than its count allows.
    """
    drawn = {name: weight for name, weight in settings.sources.items() if name != PUBLIC_SOURCE}
    share = settings.sources[PUBLIC_SOURCE] / sum(settings.sources.values())
    count = min(settings.count, int(chosen / share))
    return {WITHOUT: settings.model_copy(update={"sources": drawn}), WITH: settings.model_copy(update={"count": count})}


def judging(public: int, chosen: np.ndarray, seed: int) -> np.ndarray:
    """The public images that students are compared on: of those that were not chosen, unless all were."""
    rest = np.setdiff1d(np.arange(public), chosen)
    return np.random.default_rng(seed).permutation(rest if len(rest) else chosen)[:JUDGES]


def judges(teacher: TeacherNetwork, drawn: ImageSet, public: ImageSet) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The images that students are compared on, with the teacher's labels: of the private domain, and public ones.

    drawn: of a generator, with the classes asked for; public: (N, H, W, C) uint8 inside, as those are.
    """
    own = classify(teacher, public).argmax(dim=1).numpy()
    return {"drawn": (drawn.images, relabelled(teacher, drawn).labels), "public": (public.images, own)}


def agreement(
    released: Varied, judged: Mapping[str, tuple[np.ndarray, np.ndarray]], classes: int, seed: int
) -> dict[str, float]:
    """How often a student of the release has the teacher's label, the mean over these labels, for each of the judges."""
    images, labels = released.images.permute(0, 2, 3, 1).numpy(), released.labels.numpy()
    student = fit(STUDENT, images, labels, classes, schedule_of(STUDENT, len(images), 1, STEPS), seed)
    found = {}
    for name, (shown, given) in judged.items():
        right = logits(student, shown).argmax(axis=1) == given
        found[name] = float(np.mean([right[given == label].mean() for label in np.unique(given)]))
    return found


def chosen_mixture(agreements: Mapping[str, Mapping[str, float]]) -> str:
    """WITH, if its student is CLOSE on drawn images to that of WITHOUT, and not behind it on public ones."""
    alone, beside = agreements[WITHOUT], agreements[WITH]
    good = beside["drawn"] >= alone["drawn"] - CLOSE and beside["public"] >= alone["public"]
    return WITH if good else WITHOUT
