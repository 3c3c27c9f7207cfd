"""Drawing labelled images from the trained models, alone or as a weighted mixture. All of it is post-processing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sfumato.compute import device
from sfumato.config import Synthesize
from sfumato.diffusion.sampler import sample
from sfumato.dpsgd.lora import load_base, load_synthesizer
from sfumato.precision import bfloat16_is_faster
from sfumato.public_model.network import LatentDiffusion, load_codec, load_scheduler
from sfumato.public_model.sampler import sample_latents
from sfumato.warmup.generator import balanced_labels, draw_images, load_generator

LATENT_BATCH = 16  # images of a public model at a time
Progress = Callable[[int, int], None]


def draw_from(
    name: str,
    paths: Mapping[str, Path],
    count: int,
    settings: Synthesize,
    priors: Tensor | None,
    seed: int,
    progress: Progress | None = None,
    shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """`count` images of one model: the one-step generator for "auxiliary", the diffusion sampler for the others.

    paths: the artifact of each model; a fine-tuned one saved as adapters needs that of "pretrain" too. priors: (classes,) label
    shares, None for equal ones;
    shape: (C, H, W) of the images wanted, which a public model's are resized to. Returns ((N, C, H, W) float32 in [0, 1], (N,) int64).
    """
    if name == "auxiliary":
        return draw_images(load_generator(paths[name]), count, priors, seed)
    model = load_synthesizer(paths["finetune"], paths["pretrain"]) if name == "finetune" else load_base(paths[name])
    model.to(device())
    random = torch.Generator().manual_seed(seed)
    labels = balanced_labels(count, priors, model.classes, random)
    if isinstance(model, LatentDiffusion):
        return draw_latent(model, paths["pretrain"], labels, settings, random, shape, progress), labels
    images = []
    for part in labels.split(500):
        images.append(sample(model, part, settings.steps, settings.guidance, random, batch=500).cpu())
        if progress:
            progress(sum(map(len, images)), count)
    return torch.cat(images), labels


def draw_latent(
    model: LatentDiffusion,
    pretrain: Path,
    labels: Tensor,
    settings: Synthesize,
    random: torch.Generator,
    shape: Sequence[int] | None,
    progress: Progress | None = None,
) -> Tensor:
    """Images of a public text-to-image model, decoded and resized to `shape`. pretrain: the artifact that refers to the model."""
    scheduler, codec = load_scheduler(pretrain), load_codec(pretrain, device())
    channels, height, width = shape or (codec.channels, model.image_size, model.image_size)

    def step(autocast: bool) -> Tensor:
        blank = torch.zeros(min(len(labels), LATENT_BATCH), dtype=torch.int64)
        return sample_latents(model, scheduler, blank, 1, settings.guidance, torch.Generator().manual_seed(0), autocast)

    half = device().type == "cuda" and bfloat16_is_faster(step, ("latent sampling", model.resolution), device())
    images = []
    for part in labels.split(LATENT_BATCH):
        latents = sample_latents(model, scheduler, part, settings.steps, settings.guidance, random, half)
        images.append(codec.decode(latents, (channels, height, width)))
        if progress:
            progress(sum(map(len, images)), len(labels))
    return torch.cat(images)


def draw_mixture(
    paths: Mapping[str, Path],
    settings: Synthesize,
    priors: Tensor | None,
    seed: int,
    progress: Progress | None = None,
    shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, dict[str, int]]:
    """The release: `settings.count` images, each source's part by weight, shuffled. Also returns how many came from each source."""
    whole = sum(settings.sources.values())
    parts: dict[str, int] = {
        name: int(settings.count * weight / whole) for name, weight in sorted(settings.sources.items())
    }
    parts[max(parts, key=lambda name: parts[name])] += settings.count - sum(parts.values())
    drawn = [
        draw_from(name, paths, part, settings, priors, seed + i, progress, shape)
        for i, (name, part) in enumerate(parts.items())
        if part
    ]
    order = torch.randperm(settings.count, generator=torch.Generator().manual_seed(seed))
    images, labels = (torch.cat(tensors)[order] for tensors in zip(*drawn, strict=True))
    return images, labels, parts


def sorted_examples(images: Tensor, labels: Tensor, classes: int, per_class: int) -> Tensor:
    """The first `per_class` images of each class, class by class, for a grid; fewer where a class has fewer (then blanks)."""
    rows = []
    for label in range(classes):
        found = images[labels == label][:per_class]
        blanks = torch.ones(per_class - len(found), *images.shape[1:])
        rows += [found, blanks]
    return torch.cat(rows)
