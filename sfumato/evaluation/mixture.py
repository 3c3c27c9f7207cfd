"""Which mixture is released: that whose student agrees with the teacher. It looks at no real image, so it is free."""

from collections.abc import Mapping

import numpy as np

from sfumato.data.images import ImageSet
from sfumato.evaluation.downstream import fit, schedule_of
from sfumato.features.teacher_network import TeacherNetwork, relabelled
from sfumato.release.variation import Varied
from sfumato.training.supervised import logits

STEPS = 200  # of its training
JUDGES = 2000  # images of each kind that the students are compared on
WITH = "with public images"
WITHOUT = "without public images"
Judges = Mapping[str, tuple[np.ndarray, np.ndarray]]  # (N, H, W, C) uint8 images and the teacher's labels, by domain


def judges(teacher: TeacherNetwork, drawn: ImageSet, public: ImageSet, seed: int) -> Judges:
    """The images that students are compared on: new drawn ones, and public ones with equally many of each class."""
    some = public.take(np.random.default_rng(seed).permutation(len(public))[:JUDGES])
    equal = ImageSet(some.images, np.arange(len(some)) % len(drawn.classes), drawn.classes)
    return {name: (one.images, relabelled(teacher, one).labels) for name, one in (("drawn", drawn), ("public", equal))}


def agreement(released: Varied, judged: Judges, classes: int, seed: int) -> dict[str, float]:
    """How often a student of the release has the teacher's label, as the mean over these, for each of the judges."""
    images = released.images.permute(0, 2, 3, 1).numpy()
    student = fit("cnn", images, released.labels.numpy(), classes, schedule_of("cnn", len(images), 1, STEPS), seed)
    shares = {}
    for name, (shown, given) in judged.items():
        right = logits(student, shown).argmax(axis=1) == given
        shares[name] = float(np.mean([right[given == label].mean() for label in np.unique(given)]))
    return shares


def chosen_mixture(agreements: Mapping[str, Mapping[str, float]]) -> str:
    """WITH, if its student agrees at most 2 % less on drawn images than WITHOUT's, and no less on public."""
    gained = {judge: agreements[WITH][judge] - agreements[WITHOUT][judge] for judge in ("drawn", "public")}
    good = gained["drawn"] >= -0.02 and gained["public"] >= 0  # two standard errors of JUDGES images
    return WITH if good else WITHOUT
