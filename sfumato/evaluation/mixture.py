"""Choose the mixture to release: with public images only if a student trained with them agrees with
the teacher as well.

It reads no real image, so it is free.
"""

from collections.abc import Mapping

import numpy as np

from sfumato.data.images import ImageSet
from sfumato.evaluation.downstream import fit_classifier, schedule_of
from sfumato.features.teacher_network import TeacherNetwork, relabelled
from sfumato.release.variation import Varied
from sfumato.training.supervised import logits

STEPS = 200  # Training steps of a student
JUDGES = 2000  # Number of images of each kind on which students are compared
WITH = "with public images"
WITHOUT = "without public images"
# (N, H, W, C) uint8 images and the teacher's labels, by domain
Judges = Mapping[str, tuple[np.ndarray, np.ndarray]]


def judges(teacher: TeacherNetwork, drawn: ImageSet, public: ImageSet, seed: int) -> Judges:
    """Return the images on which students are compared: newly drawn images, and public images,
    equally many for each class by the teacher's labels.
    """
    some = public.take(np.random.default_rng(seed).permutation(len(public))[:JUDGES])
    equal = ImageSet(some.images, np.arange(len(some)) % len(drawn.classes), drawn.classes)
    return {
        name: (one.images, relabelled(teacher, one).labels)
        for name, one in (("drawn", drawn), ("public", equal))
    }


def agreement(released: Varied, judged: Judges, classes: int, seed: int) -> dict[str, float]:
    """Measure how often a student trained on the release agrees with the teacher, for each set of
    `judged`. The result is the mean over the teacher's labels.
    """
    images = released.images.permute(0, 2, 3, 1).numpy()
    student = fit_classifier(
        "cnn",
        images,
        released.labels.numpy(),
        classes,
        schedule_of("cnn", len(images), 1, STEPS),
        seed,
    )
    shares = {}
    for name, (shown, given) in judged.items():
        right = logits(student, shown).argmax(axis=1) == given
        shares[name] = float(np.mean([right[given == label].mean() for label in np.unique(given)]))
    return shares


def chosen_mixture(agreements: Mapping[str, Mapping[str, float]]) -> str:
    """Return WITH if its student agrees with the teacher at most 2 % less often on drawn images,
    and no less often on public images.
    """
    gained = {
        judge: agreements[WITH][judge] - agreements[WITHOUT][judge] for judge in ("drawn", "public")
    }
    # two standard errors of JUDGES images
    good = gained["drawn"] >= -0.02 and gained["public"] >= 0
    return WITH if good else WITHOUT
