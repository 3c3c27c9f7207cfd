"""Choose the mixture to release: with or without public images.

A student is a classifier that is trained on the set to release. One student is trained with public
images, and another one without them. Both are compared with the teacher, on newly drawn images and
on public images. Public images are left out if they make the student agree with the teacher less
often. On drawn images, a small decrease is allowed (see `chosen_mixture`). No function here reads
real images, so the choice costs nothing.
"""

from collections.abc import Mapping

import numpy as np

from sfumato.data.images import ImageSet
from sfumato.evaluation.downstream import fit_classifier, schedule_of
from sfumato.features.teacher_network import TeacherNetwork, relabelled
from sfumato.release.variation import Varied
from sfumato.training.supervised import logits

STEPS = 200  # Training steps of a student
JUDGES = 2000  # Number of drawn images, and of public images, on which students are compared
WITH = "with public images"
WITHOUT = "without public images"
# Images, (N, H, W, C) uint8, and the teacher's labels, (N,), by kind: "drawn" and "public"
Judges = Mapping[str, tuple[np.ndarray, np.ndarray]]


def judges(teacher: TeacherNetwork, drawn: ImageSet, public: ImageSet, seed: int) -> Judges:
    """Return the images on which students are compared, with the teacher's labels.

    One set contains newly drawn images, the other public images. The teacher labels the public
    images so that each class gets about the same number of images.
    """
    sample = public.take(np.random.default_rng(seed).permutation(len(public))[:JUDGES])
    equal = ImageSet(sample.images, np.arange(len(sample)) % len(drawn.classes), drawn.classes)
    return {
        name: (image_set.images, relabelled(teacher, image_set).labels)
        for name, image_set in (("drawn", drawn), ("public", equal))
    }


def agreement(released: Varied, judged: Judges, classes: int, seed: int) -> dict[str, float]:
    """Train a student on `released`, and measure how often it agrees with the teacher.

    Returns the balanced agreement for each set in `judged`: the share of images on which student
    and teacher agree, computed separately for each of the teacher's labels and then averaged.
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
    for name, (test_images, teacher_labels) in judged.items():
        agrees = logits(student, test_images).argmax(axis=1) == teacher_labels
        shares[name] = float(
            np.mean([agrees[teacher_labels == label].mean() for label in np.unique(teacher_labels)])
        )
    return shares


def chosen_mixture(agreements: Mapping[str, Mapping[str, float]]) -> str:
    """Return WITH if public images do not make the student worse, otherwise WITHOUT.

    Public images are included if two conditions are met. On public images, the student trained
    with public images must agree with the teacher at least as often as the other student. On drawn
    images, it may agree up to two percentage points less often.

    agreements: results of `agreement` for WITH and WITHOUT.
    """
    gained = {
        judge: agreements[WITH][judge] - agreements[WITHOUT][judge] for judge in ("drawn", "public")
    }
    # 0.02 is about two standard errors of a share that is measured on JUDGES images
    good = gained["drawn"] >= -0.02 and gained["public"] >= 0
    return WITH if good else WITHOUT
