"""Variants of released images, which are free: distorted, blended with a class easily confused; teacher labels."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.data.images import as_bytes, as_floats
from sfumato.features.teacher_network import TeacherNetwork, at_shares, probabilities_of, share_offsets
from sfumato.settings.release import Synthesize

BLEND = (0.3, 0.7)  # the part of the first image in a blend
KINDS = ("plain", "distorted", "blend", "public")  # of released images
PLAIN, *_, FROM_PUBLIC = KINDS
VARIED_BATCH = 500  # images varied at a time, which bounds the memory


@dataclass(frozen=True)
class Varied:
    """images: (N, C, H, W) uint8; labels: (N,) int64; kinds: (N,) of KINDS, those as drawn first.

    asked: (n,) int64, the classes asked of the models for the first n images, which are as drawn, if `labels` are the
    teacher's; mixture: how it was chosen, "chosen" by name and "agreement" by mixture, for the card.
    """

    images: Tensor
    labels: Tensor
    kinds: np.ndarray
    asked: Tensor | None = None
    mixture: Mapping[str, Any] | None = None


def vary(
    images: Tensor,
    labels: Tensor,
    settings: Synthesize,
    teacher: TeacherNetwork | None,
    seed: int,
    public: np.ndarray | bool = False,
) -> Varied:
    """Change a part of the images by `settings`, and label all by the teacher under `relabel`, by the shares asked.

    images: (N, C, H, W) uint8, in random order; the parts that are varied are replaced in place; labels: (N,) int64,
    those asked of the models; seed: fixes the variants; public: (N,) which images are public ones.
    """
    distorted = int(len(images) * settings.distorted)
    blended = int(len(images) * settings.mixed)
    plain = len(images) - distorted - blended
    random = torch.Generator().manual_seed(seed)
    asked = None
    if settings.relabel and teacher is not None and teacher.several:
        vary_parts(images, plain, distorted, None, random)
        places = probabilities_of(teacher, images).argsort(dim=0, descending=True, stable=True).argsort(dim=0)
        labels = (places < labels.sum(dim=0)).to(torch.uint8)  # each label keeps its number of images, the surest
    elif settings.relabel and teacher is not None:
        asked = labels[:plain]
        seen = probabilities_of(teacher, images)
        offsets = share_offsets(seen[:plain], asked.bincount(minlength=teacher.classes))
        vary_parts(images, plain, distorted, at_shares(seen, offsets), random)
        seen = torch.cat([seen[:plain], probabilities_of(teacher, images[plain:])])
        labels = at_shares(seen, offsets).argmax(dim=1)
    kinds = np.array(KINDS[:3]).repeat([plain, distorted, blended])
    kinds[np.logical_and(kinds == PLAIN, public)] = FROM_PUBLIC
    return Varied(images, labels, kinds, asked)


def beside_public(varied: Varied, images: Tensor, labels: Tensor, every: int, seed: int) -> Varied:
    """Public images, (B, C, H, W) uint8, and their labels, (B,), among one in `every` of the drawn and varied ones."""
    kinds = np.concatenate([varied.kinds[::every], np.repeat(FROM_PUBLIC, len(images))])
    drawn = torch.from_numpy(np.flatnonzero((kinds == PLAIN) | (kinds == FROM_PUBLIC)))
    mixed = torch.randperm(len(drawn), generator=torch.Generator().manual_seed(seed))
    order = torch.cat([drawn[mixed], torch.from_numpy(np.flatnonzero((kinds != PLAIN) & (kinds != FROM_PUBLIC)))])
    return Varied(
        torch.cat([varied.images[::every], images])[order],
        torch.cat([varied.labels[::every], labels])[order],
        kinds[order.numpy()],
        None if varied.asked is None else torch.cat([varied.asked[::every], labels])[mixed],
    )


def vary_parts(
    images: Tensor, plain: int, distorted: int, probabilities: Tensor | None, random: torch.Generator
) -> None:
    """Blend the last images with earlier ones, then distort `distorted` ones after the plain ones, in place."""
    end = plain + distorted
    if probabilities is not None and end < len(images):
        weights, partners = blend_partners(probabilities, end, random)
        for rows in torch.arange(end, len(images)).split(VARIED_BATCH):
            weight = weights[rows - end, None, None, None]
            mixed = weight * as_floats(images[rows]) + (1 - weight) * as_floats(images[partners[rows - end]])
            images[rows] = as_bytes(mixed)
    for rows in torch.arange(plain, end).split(VARIED_BATCH):
        images[rows] = as_bytes(distort(as_floats(images[rows]), random))


def uniform(random: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=random)


def distort(images: Tensor, random: torch.Generator) -> Tensor:
    """(B, C, H, W) in [0, 1] warped, textured by products, which leave a dark ground dark, and in another light."""
    if not len(images):
        return images
    number, _, height, width = images.shape
    linear = torch.eye(2) + 0.12 * uniform(random, -1, 1, number, 2, 2)  # sides and slants
    affine = torch.cat([linear, 0.06 * uniform(random, -1, 1, number, 2, 1)], dim=2)
    bent = torch.randn(number, 2, 5, 5, generator=random) * (0.1 * uniform(random, 0, 1, number, 1, 1, 1))
    field = F.interpolate(bent, (height, width), mode="bicubic", align_corners=True).permute(0, 2, 3, 1)
    grid = F.affine_grid(affine, list(images.shape), align_corners=False) + field
    warped = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    contrast = uniform(random, 0, 0.6, number, 1, 1, 1)
    woven = warped * (1 + contrast * texture(number, height, width, random))
    return woven.clamp(0, 1) ** (0.6 * uniform(random, -1, 1, number, 1, 1, 1)).exp()


def texture(number: int, height: int, width: int, random: torch.Generator) -> Tensor:
    """Stripes, upright, level or slanted, for half of them, and smooth spots: (number, 1, height, width), about ±1."""
    one_each = number, 1, 1, 1
    down, across = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    slanted = uniform(random, 0, math.pi, *one_each)
    upright = (slanted / (math.pi / 2)).round() * (math.pi / 2)
    angle = torch.where(uniform(random, 0, 1, *one_each) < 0.5, upright, slanted)
    # 1 to 7 half waves across the image, 4 to 14 spots
    phase = math.pi * uniform(random, 1, 7, *one_each) * (across * angle.cos() + down * angle.sin())
    phase += uniform(random, 0, 2 * math.pi, *one_each)
    cells = int(torch.randint(4, 15, (1,), generator=random))
    drawn = torch.randn(number, 1, cells, cells, generator=random)
    spots = F.interpolate(drawn, (height, width), mode="bicubic", align_corners=True)
    return torch.where(uniform(random, 0, 1, *one_each) < 0.5, phase.sin(), spots)


def blend_partners(probabilities: Tensor, end: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """For each image from place `end` on: its weight in a blend, and an earlier image of a class it is confused with.

    probabilities: (N, classes), by which the second class is drawn; any image, if none is of it. Returns (B,) of each.
    """
    classes = probabilities[:end].argmax(dim=1)
    blended = probabilities[end:]
    rest = blended.scatter(1, blended.argmax(dim=1, keepdim=True), 0) + 1e-6
    second = torch.multinomial(rest, 1, generator=random).flatten()
    partner = torch.randint(end, (len(blended),), generator=random)
    for label in second.unique():
        of_class = (classes == label).nonzero().flatten()
        wanted = second == label
        if len(of_class):
            partner[wanted] = of_class[torch.randint(len(of_class), (int(wanted.sum()),), generator=random)]
    return uniform(random, *BLEND, len(blended)), partner
