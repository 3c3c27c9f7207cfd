"""Kernel herding: choose drawn images whose mean features are near the released means.

Herding costs no privacy.

The stage `frequency` releases the mean features of the sensitive images, with noise. A generator
may have a fault that changes the means of its images by less than this noise, for example if one
image in twenty shows only a plain coloured disc. Longer fitting cannot remove such a fault. Faulty
images have small inner products with the released means, so `nearest_mean` leaves them out.

Source: Chen, Welling and Smola 2010. Here, random Fourier features approximate the kernel.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sfumato.data.images import ImageSet, as_floats
from sfumato.features import FeatureMeans
from sfumato.features.fourier import FourierFeatures
from sfumato.features.teacher_network import TeacherNetwork, relabelled
from sfumato.release.synthesis import Drawn
from sfumato.runtime.compute import device
from sfumato.settings.release import Synthesize

COMPARED_CELLS = 4000  # Maximum number of entries of the feature vectors φ to compare
IMAGES_PER_PART = 5000  # Maximum number of images to choose among at a time


def draw_herded(
    draw: Callable[..., Drawn],
    means: FeatureMeans,
    priors: Tensor,
    teacher: TeacherNetwork | None,
    settings: Synthesize,
    seed: int,
) -> Drawn:
    """Draw `settings.herding` times as many images as needed, and choose among them by herding.

    With `settings.relabel`, the teacher labels the drawn images before the choice.

    draw: function that draws images, such as `draw_mixture`.
    """
    draw_settings = settings.model_copy(update={"count": settings.count * settings.herding})
    images, labels, sources = draw(settings=draw_settings, seed=seed)
    if teacher is not None and settings.relabel:
        pictures = ImageSet(
            images.permute(0, 2, 3, 1).numpy(), labels.numpy(), (*map(str, range(teacher.classes)),)
        )
        labels = torch.from_numpy(relabelled(teacher, pictures).labels)
    rows = choose_by_herding(images, labels, means, priors, settings.count)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
    return images[rows], labels[rows], sources[rows.numpy()]


def choose_by_herding(
    images: Tensor, labels: Tensor, means: FeatureMeans, priors: Tensor, number: int
) -> Tensor:
    """Choose the images to keep, class by class. Returns their indices, (number,) int64.

    The same share of each class is kept, to within one image.

    images: (N, C, H, W) uint8;
    labels: (N,) int64;
    means: release of `frequency`;
    priors: (classes,), share of each class. In a class with share 0, the first images are kept.
    """
    features = means.features.to(device())
    cells = torch.randperm(features.size, generator=torch.Generator().manual_seed(features.seed))[
        :COMPARED_CELLS
    ]
    ends = labels.bincount(minlength=len(priors)).cumsum(0) * number // len(labels)
    kept_indices = []
    for label, count in enumerate(ends.diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()):
        rows = (labels == label).nonzero().flatten()
        if count and priors[label] > 0:
            target = (means.table[cells, label] / priors[label]).to(device())
            for part, share in zip(
                rows.split(IMAGES_PER_PART), split_count(count, len(rows)), strict=True
            ):
                kept_indices.append(
                    part[nearest_mean(feature_cells(features, images[part], cells), target, share)]
                )
        else:
            kept_indices.append(rows[:count])
    return torch.cat(kept_indices)


def split_count(number: int, size: int) -> list[int]:
    """Return how many images to keep in each part of a class.

    number: how many images of the class to keep;
    size: number of images of the class, which are split into parts of IMAGES_PER_PART images.
    """
    starts = range(0, size + IMAGES_PER_PART, IMAGES_PER_PART)
    ends = [number * min(end, size) // size for end in starts]
    return np.diff(ends).tolist()


@torch.no_grad()
def feature_cells(features: FourierFeatures, images: Tensor, cells: Tensor) -> Tensor:
    """Compute some entries of the images' feature vectors φ.

    images: (N, C, H, W) uint8; cells: indices of the entries.

    Returns (N, number of cells), on the device of `features`.
    """
    compute_device = features.amplitude.device
    columns = cells.to(compute_device)
    return torch.cat(
        [features(as_floats(part).to(compute_device))[:, columns] for part in images.split(100)]
    )


def nearest_mean(rows: Tensor, target: Tensor, number: int) -> Tensor:
    """Choose rows one by one, so that their mean approaches the target.

    Rows are excluded if their inner products with the target are among the smallest 10 %. If fewer
    than `number` rows would then remain, fewer rows are excluded.

    rows: (N, d), all of the same norm;
    target: (d,).

    Returns the indices of the chosen rows, (number,) int64.
    """
    products = rows @ target
    overlaps = torch.zeros_like(products)  # inner products with the sum of the chosen rows
    left_out = min(int(0.1 * len(rows)), len(rows) - number)
    free = torch.ones_like(products, dtype=torch.bool)
    free[products.argsort()[:left_out]] = False
    indices = torch.zeros(number, dtype=torch.int64)
    for count in range(number):
        best = torch.where(free, (count + 1) * products - overlaps, -torch.inf).argmax()
        free[best] = False
        overlaps += rows @ rows[best]
        indices[count] = best
    return indices
