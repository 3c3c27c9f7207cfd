"""Variants of released images: slightly changed ones, blends of classes easily confused, labels by the teacher.

All of it works on what was released, so it is free. Source: METHODS §9c.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.config import Synthesize
from sfumato.queries.teacher import TeacherNetwork, at_shares, probabilities_of, share_offsets

MOVED, BRIGHTER, BLURRED = 0.04, 0.2, 0.5  # largest part of an affine map, of log γ, of the weight of a 3×3 blur
BLEND = (0.3, 0.7)  # the part of the first image in a blend


@dataclass(frozen=True)
class Varied:
    """images: (N, C, H, W) float32 in [0, 1], plain ones first; labels: (N,) int64; parts: how many of each kind."""

    images: Tensor
    labels: Tensor
    parts: dict[str, int]


def vary(images: Tensor, labels: Tensor, settings: Synthesize, teacher: TeacherNetwork | None, seed: int) -> Varied:
    """Change a part of the images as `settings` says, and label all by the teacher where it says so.

    images: (N, C, H, W) float32 in [0, 1], in random order; labels: (N,) int64, those asked of the models. teacher:
    None where nothing needs one. It labels the plain images so that classes keep the shares that were asked, and the
    others by the same rule. `seed` fixes the variants; the global generator stays as it was.
    """
    augmented, mixed = (int(len(images) * part) for part in (settings.augmented, settings.mixed))
    plain = len(images) - augmented - mixed
    random = torch.Generator().manual_seed(seed)
    parts = [images[:plain], augment(images[plain : plain + augmented], random)]
    if settings.relabel and teacher is not None:
        seen = probabilities_of(teacher, images)
        offsets = share_offsets(seen[:plain], labels[:plain].bincount(minlength=teacher.classes))
        if mixed:
            parts.append(blend(images[plain + augmented :], images, at_shares(seen, offsets), random))
        if plain < len(images):
            seen = torch.cat([seen[:plain], probabilities_of(teacher, torch.cat(parts[1:]))])
        labels = at_shares(seen, offsets).argmax(dim=1)
    images = torch.cat(parts)
    kinds = {"plain": plain, "augmented": augmented, "mixed": mixed}
    return Varied(images, labels, {name: number for name, number in kinds.items() if number})


def augment(images: Tensor, random: torch.Generator) -> Tensor:
    """Each image under a small affine map, another brightness and a light blur. (B, C, H, W) in [0, 1], and so out."""
    if not len(images):
        return images

    def uniform(*shape: int) -> Tensor:
        return 2 * torch.rand(len(images), *shape, generator=random) - 1

    turned = torch.eye(2, 3) + MOVED * uniform(2, 3)
    grid = F.affine_grid(turned, list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    brighter = moved.clamp(0, 1) ** (BRIGHTER * uniform(1, 1, 1)).exp()
    weight = BLURRED * uniform(1, 1, 1).abs()
    return brighter.lerp(F.avg_pool2d(F.pad(brighter, (1, 1, 1, 1), mode="replicate"), 3, 1), weight)


def blend(images: Tensor, others: Tensor, probabilities: Tensor, random: torch.Generator) -> Tensor:
    """Each image blended with one of a class that the teacher confuses it with.

    images: the last B of `others`, (N, C, H, W); probabilities: (N, classes) of `others`. An image's second class is
    drawn by the teacher's probability for it; where no image is of that class, any image is taken.
    """
    classes, own = probabilities.argmax(dim=1), probabilities[len(others) - len(images) :]
    rest = own.scatter(1, own.argmax(dim=1, keepdim=True), 0) + 1e-6
    second = torch.multinomial(rest, 1, generator=random).flatten()
    partner = torch.randint(len(others), (len(images),), generator=random)
    for label in second.unique():
        known, asked = (classes == label).nonzero().flatten(), (second == label).nonzero().flatten()
        if len(known):
            partner[asked] = known[torch.randint(len(known), (len(asked),), generator=random)]
    low, high = BLEND
    weight = low + (high - low) * torch.rand(len(images), 1, 1, 1, generator=random)
    return weight * images + (1 - weight) * others[partner]
