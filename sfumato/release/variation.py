"""Distort and blend released images, and let the teacher label them, at no privacy cost."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.data.images import as_bytes, as_floats
from sfumato.features.teacher_network import (
    Labelling,
    TeacherNetwork,
    at_shares,
    best_temperature,
    probabilities_of,
    share_offsets,
)
from sfumato.settings.release import Synthesize

BLEND = (0.3, 0.7)  # Range of an image's own weight in its blend with a partner
KINDS = ("plain", "distorted", "blend", "public")  # Kinds of released images
PLAIN, _, BLENDED, FROM_PUBLIC = KINDS
VARIED_BATCH = 500  # Images varied at a time, so that memory is bounded


@dataclass(frozen=True)
class Varied:
    """Images of a release. Images that were not distorted or blended come first.

    images: (N, C, H, W) uint8;
    labels: (N,) int64, or (N, classes) of 0 and 1 if images have several labels;
    kinds: (N,), one of KINDS for each image;
    requested_labels: (n,) int64. For each of the n images that were not distorted or blended, this
    is the class that was requested from the model. None if the teacher did not label the release,
    if images have several labels, or if `settings.herding` is above 1;
    mixture: entry of the card about the decision whether to include public images. "chosen" names
    the chosen mixture. "agreement" contains, for each mixture, how often a classifier trained on it
    agrees with the teacher;
    labelling: rule by which the teacher labelled the images; None if the teacher did not label
    them, or if images have several labels.
    """

    images: Tensor
    labels: Tensor
    kinds: np.ndarray
    requested_labels: Tensor | None = None
    mixture: Mapping[str, object] | None = None
    labelling: Labelling | None = None


def vary(
    images: Tensor,
    labels: Tensor,
    settings: Synthesize,
    teacher: TeacherNetwork | None,
    seed: int,
    public: np.ndarray | bool = False,
) -> Varied:
    """Distort or blend some of the images, as `settings` state.

    With `settings.relabel`, the teacher then labels all images. Each label gets the same share of
    the images as was requested from the models. If images have several labels, this is a share of
    all images. Otherwise, `settings.shares` states whether it is a share of the plain images only,
    or of each kind of images separately.

    images: (N, C, H, W) uint8, in random order. Varied images replace the originals in place;
    labels: labels that were requested from the models, in the form of `Varied.labels`;
    seed: fixes the variants;
    public: (N,) bool, True for public images.
    """
    distorted = int(len(images) * settings.distorted)
    blended = int(len(images) * settings.mixed)
    plain = len(images) - distorted - blended
    random = torch.Generator().manual_seed(seed)
    requested_labels = None
    labelling = None
    parts = dict(zip(KINDS, (plain, distorted, blended), strict=False))
    if settings.relabel and teacher is not None and teacher.several:
        vary_parts(images, plain, distorted, None, random)
        ranks = (
            probabilities_of(teacher, images)
            .argsort(dim=0, descending=True, stable=True)
            .argsort(dim=0)
        )
        # If n images were requested with a label, the n images for which the teacher finds this
        # label most probable now get it
        labels = (ranks < labels.sum(dim=0)).to(torch.uint8)
    elif settings.relabel and teacher is not None:
        requested_labels = labels[:plain]
        probabilities = probabilities_of(teacher, images)
        numbers = requested_labels.bincount(minlength=teacher.classes)
        if settings.shares == "each":
            # Labels of all images are counted, because the counts of plain images vary at random
            numbers = labels.bincount(minlength=teacher.classes) * plain / len(images)
        offsets = {PLAIN: share_offsets(probabilities[:plain], numbers)}
        shares = at_shares(probabilities, offsets[PLAIN])
        vary_parts(images, plain, distorted, shares, random)
        labelled = [shares[:plain]]
        for kind, rows in zip(parts, images.split([*parts.values()]), strict=True):
            if kind != PLAIN and len(rows):
                probabilities = probabilities_of(teacher, rows)
                if settings.shares == "each":
                    offsets[kind] = share_offsets(probabilities, numbers * len(rows) / plain)
                labelled.append(at_shares(probabilities, offsets.get(kind, offsets[PLAIN])))
        labels = torch.cat(labelled).argmax(dim=1)
        labelling = Labelling(offsets, best_temperature(shares[:plain], requested_labels))
    kinds = np.array([*parts]).repeat([*parts.values()])
    kinds[np.logical_and(kinds == PLAIN, public)] = FROM_PUBLIC
    return Varied(images, labels, kinds, requested_labels, labelling=labelling)


def beside_public(varied: Varied, images: Tensor, labels: Tensor, stride: int, seed: int) -> Varied:
    """Keep one in `stride` drawn images, and add public images.

    Plain drawn images and public images come first, shuffled together. Distorted and blended images
    follow.

    varied: drawn images, including distorted and blended ones;
    images: (B, C, H, W) uint8, public images;
    labels: (B,), labels of the public images.
    """
    kinds = np.concatenate([varied.kinds[::stride], np.repeat(FROM_PUBLIC, len(images))])
    plain_rows = torch.from_numpy(np.flatnonzero((kinds == PLAIN) | (kinds == FROM_PUBLIC)))
    permutation = torch.randperm(len(plain_rows), generator=torch.Generator().manual_seed(seed))
    order = torch.cat(
        [
            plain_rows[permutation],
            torch.from_numpy(np.flatnonzero((kinds != PLAIN) & (kinds != FROM_PUBLIC))),
        ]
    )
    return replace(
        varied,
        images=torch.cat([varied.images[::stride], images])[order],
        labels=torch.cat([varied.labels[::stride], labels])[order],
        kinds=kinds[order.numpy()],
        requested_labels=None
        if varied.requested_labels is None
        else torch.cat([varied.requested_labels[::stride], labels])[permutation],
    )


def vary_parts(
    images: Tensor,
    plain: int,
    distorted: int,
    probabilities: Tensor | None,
    random: torch.Generator,
) -> None:
    """Distort and blend images in place.

    The first `plain` images stay unchanged, the next `distorted` images are distorted, and all
    others are blended with earlier images.

    probabilities: (N, classes), by the teacher. With None, no images are blended.
    """
    end = plain + distorted
    if probabilities is not None and end < len(images):
        weights, partners = blend_partners(probabilities, end, random)
        for rows in torch.arange(end, len(images)).split(VARIED_BATCH):
            weight = weights[rows - end, None, None, None]
            blends = weight * as_floats(images[rows]) + (1 - weight) * as_floats(
                images[partners[rows - end]]
            )
            images[rows] = as_bytes(blends)
    for rows in torch.arange(plain, end).split(VARIED_BATCH):
        images[rows] = as_bytes(distort(as_floats(images[rows]), random))


def uniform(random: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=random)


def distort(images: Tensor, random: torch.Generator) -> Tensor:
    """Warp images, (B, C, H, W) in [0, 1], multiply them by textures, and change their brightness.

    Because textures are multiplied with the image, a dark background stays dark.
    """
    if not len(images):
        return images
    number, _, height, width = images.shape
    linear = torch.eye(2) + 0.12 * uniform(random, -1, 1, number, 2, 2)  # scale and slant
    affine = torch.cat([linear, 0.06 * uniform(random, -1, 1, number, 2, 1)], dim=2)
    bent = torch.randn(number, 2, 5, 5, generator=random) * (
        0.1 * uniform(random, 0, 1, number, 1, 1, 1)
    )
    field = F.interpolate(bent, (height, width), mode="bicubic", align_corners=True).permute(
        0, 2, 3, 1
    )
    grid = F.affine_grid(affine, list(images.shape), align_corners=False) + field
    warped = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    contrast = uniform(random, 0, 0.6, number, 1, 1, 1)
    woven = warped * (1 + contrast * texture(number, height, width, random))
    return woven.clamp(0, 1) ** (0.6 * uniform(random, -1, 1, number, 1, 1, 1)).exp()


def texture(number: int, height: int, width: int, random: torch.Generator) -> Tensor:
    """Draw one texture per image: (number, 1, height, width), about −1 to 1.

    A texture has stripes or smooth spots, with equal probability. The stripes of an image are
    parallel: with probability 1/2 vertical or horizontal, otherwise at a random angle.
    """
    one_each = number, 1, 1, 1
    y, x = torch.meshgrid(
        torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij"
    )
    slanted = uniform(random, 0, math.pi, *one_each)
    upright = (slanted / (math.pi / 2)).round() * (math.pi / 2)
    angle = torch.where(uniform(random, 0, 1, *one_each) < 0.5, upright, slanted)
    # Stripes have 1 to 7 waves across the image. There are 4 to 14 spots per side.
    phase = math.pi * uniform(random, 1, 7, *one_each) * (x * angle.cos() + y * angle.sin())
    phase += uniform(random, 0, 2 * math.pi, *one_each)
    cells = int(torch.randint(4, 15, (1,), generator=random))
    noise = torch.randn(number, 1, cells, cells, generator=random)
    spots = F.interpolate(noise, (height, width), mode="bicubic", align_corners=True)
    return torch.where(uniform(random, 0, 1, *one_each) < 0.5, phase.sin(), spots)


def blurred(images: Tensor) -> Tensor:
    """Blur images, (B, C, H, W), by averages over squares of pixels, with repeated edges.

    A square has 3×3 pixels if the shorter side of an image has fewer than 56, 5×5 if it has fewer
    than 84, and so on.
    """
    reach = max(1, min(images.shape[2:]) // 28)
    return F.avg_pool2d(F.pad(images, (reach,) * 4, mode="replicate"), 2 * reach + 1, stride=1)


def blend_partners(
    probabilities: Tensor, end: int, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Choose the weights and partners of blended images: two tensors, (N - end,).

    The images from index `end` on are blended, each with a partner from the images before `end`.
    The weight is the share of the image itself in the blend. The partner's class is drawn by the
    teacher's probabilities for the image itself, but it is never the image's most probable class.
    If no image before `end` has the drawn class, the partner is any image before `end`.

    probabilities: (N, classes), by the teacher.
    """
    classes = probabilities[:end].argmax(dim=1)
    blended = probabilities[end:]
    rest = blended.scatter(1, blended.argmax(dim=1, keepdim=True), 0) + 1e-6
    second = torch.multinomial(rest, 1, generator=random).flatten()
    partner = torch.randint(end, (len(blended),), generator=random)
    for label in second.unique():
        of_class = (classes == label).nonzero().flatten()
        mask = second == label
        if len(of_class):
            partner[mask] = of_class[
                torch.randint(len(of_class), (int(mask.sum()),), generator=random)
            ]
    return uniform(random, *BLEND, len(blended)), partner
