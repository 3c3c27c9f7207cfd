"""Decide whether the teacher's labels fit drawn images. This costs no privacy.

A teacher that was trained on few real images may classify real images well, but drawn images no
better than by chance. In this case, classifiers learn more if each image is labelled with the class
that was requested from the model.
"""

from collections.abc import Callable

from torch import Tensor

from sfumato.features.teacher_network import (
    TeacherNetwork,
    at_shares,
    probabilities_of,
    share_offsets,
)
from sfumato.release.exports import PUBLIC_SOURCE
from sfumato.release.synthesis import Drawn
from sfumato.settings.release import Synthesize

LABELS_COMPARED = 1000  # Maximum number of drawn images to compare


def labels_fit(
    draw: Callable[..., Drawn], settings: Synthesize, teacher: TeacherNetwork, seed: int
) -> bool:
    """Return whether the teacher's labels agree well enough with the requested classes.

    The agreement is measured by Cohen's kappa, and must be at least `settings.least_agreement`.
    Returns True without a comparison if this minimum is 0, if the teacher does not label the
    release, if there are only public images, or if images have several labels.

    draw: function that draws images, such as `draw_mixture`. Public images are not compared.
    """
    weights = {name: weight for name, weight in settings.sources.items() if name != PUBLIC_SOURCE}
    checked = settings.relabel and settings.least_agreement > 0
    if not checked or not weights or teacher.several:
        return True
    count = min(settings.count, LABELS_COMPARED)
    sample = settings.model_copy(update={"count": count, "sources": weights})
    images, requested_labels, _ = draw(settings=sample, seed=seed + 2, progress=None)
    return agreement_beyond_chance(teacher, images, requested_labels) >= settings.least_agreement


def agreement_beyond_chance(
    teacher: TeacherNetwork, images: Tensor, requested_labels: Tensor
) -> float:
    """Compare the teacher's labels of drawn images with the requested classes.

    The teacher's probabilities are first adjusted, so that each class gets as many images as were
    requested.

    images: (N, C, H, W) uint8; requested_labels: (N,) int64.

    Returns Cohen's kappa: 0 if labels and requested classes agree as often as by chance, 1 if they
    always agree.
    """
    probabilities = probabilities_of(teacher, images)
    offsets = share_offsets(probabilities, requested_labels.bincount(minlength=teacher.classes))
    labels = at_shares(probabilities, offsets).argmax(dim=1)
    agreement = float((labels == requested_labels).double().mean())
    shares = [
        each.bincount(minlength=teacher.classes).double() for each in (labels, requested_labels)
    ]
    chance = float(shares[0] @ shares[1]) / len(requested_labels) ** 2
    if chance == 1:  # one class
        return 1.0
    return (agreement - chance) / (1 - chance)
