"""The generator of auxiliary images: fit it to noisy releases, and draw images from it.

Source: FETA-Pro §3.3.

No function here reads a sensitive image: the releases were charged, and the fit is post-processing.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from sfumato.data.images import ImageSet, Shape, as_floats, as_uint8, room, save_images, to_device
from sfumato.features import FeatureMeans
from sfumato.features.fourier import FourierFeatures
from sfumato.generators.gaussian import GaussianGenerator
from sfumato.generators.network import COARSE, Generator
from sfumato.privacy.rows import label_rows
from sfumato.runtime import compute
from sfumato.runtime.compute import device_of, fast_bfloat16
from sfumato.runtime.progress import Progress, no_progress
from sfumato.settings.training import Fit
from sfumato.storage.png import save_png, to_grid
from sfumato.storage.weights import load_network, save_network

GENERATOR_WEIGHTS = "generator.safetensors"  # Beside config.json
OneStep = Generator | GaussianGenerator  # (z, labels) -> images
# Number of images drawn at a time. If images have 4·COARSE² pixels or more, batches are smaller.
DRAWING_BATCH = 1000
# The fit of a class stops after this many steps without improvement (see `EarlyStopping`)
PATIENCE = 100


def new_generator(
    shape: Shape, classes: int, latent: int, width: int, seed: int, several: bool = False
) -> Generator:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Generator(shape[1:], shape[0], classes, latent, width, several)


@dataclass(frozen=True)
class Target:
    """Releases and a teacher that a generator is fitted to.

    releases: releases of Fourier features;
    teacher: (B, C, H, W) -> (B, classes) logits. With a teacher, all steps are at full resolution;
    agreement: weight, in the loss, of the cross-entropy between the teacher's logits and the
    requested labels.
    """

    releases: Sequence[FeatureMeans]
    teacher: nn.Module | None = None
    agreement: float = 0.01


def fit_generator(
    generator: Any,
    target: Target,
    config: Fit,
    priors: Tensor,
    seed: int,
    progress: Progress = no_progress,
    row_means: Tensor | None = None,
) -> Generator:
    """Fit the generator G so that its embeddings μ(G) match the released embeddings μ̃.

    Adam minimises Σ weight · ‖μ̃ − μ(G)‖², summed over the releases, plus a cross-entropy if there
    is a teacher. The fit proceeds from coarse to fine. At first, G draws the block means of
    large images instead of all pixels, and the fit uses only features that can be computed from
    these means. The fit of a class stops when it begins to fit the noise (see `EarlyStopping`), so
    more steps do no harm.

    priors: (classes,) public or released shares of the classes, which add up to 1. With several
    labels per image, the share of images with each label;
    progress: called with (steps done, all steps);
    row_means: with several labels per image, the mean of `label_rows`, (classes + 1,), from
    `PublicCounts`; otherwise None.

    Returns `generator`, with the moving average of its weights and recomputed batch-norm
    statistics, in eval mode.
    """
    device = compute.device()
    several = row_means is not None
    matches = [
        replace(each, table=each.table.to(device), features=each.features.to(device))
        for each in target.releases
    ]
    random = torch.Generator().manual_seed(seed)
    generator.to(device).to(memory_format=torch.channels_last).train()
    average = copy.deepcopy(generator)
    optimizer = torch.optim.Adam(generator.parameters(), lr=config.learning_rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step / config.steps)
    )
    columns = (priors if row_means is None else row_means).to(matches[0].table)
    levels = [
        block
        for block in generator.blocks
        if any(match.features.active(block).any() for match in matches)
    ]
    teacher = target.teacher
    blocks = block_of_steps([1] if teacher else levels, config.steps)

    for step, block in enumerate(blocks):
        if step == 0 or block != blocks[step - 1]:
            stopping = EarlyStopping(matches, seed, block)
        labels, weights = (
            to_device(part, device) for part in labels_to_fit(config.batch, priors, several, random)
        )
        z = to_device(torch.randn(config.batch, generator.latent, generator=random), device)
        # If bfloat16 is fast on this device, the network and the phases of the Fourier
        # features are computed in bfloat16. The embedding is then converted to float32, and the
        # loss is computed in float32.
        with torch.autocast(device.type, torch.bfloat16, enabled=fast_bfloat16(device.type)):
            images = generator(z, labels, block)
            # Column m of μ(G), (K, classes), is priors_m times a mean of φ over the images. Their
            # weights are column m of `weights`.
            counts = weights.sum(0)
            shares = weights * (columns / torch.where(counts > 0, counts, 1))
            embeddings = [match.features.embed(images, shares) for match in matches]
            loss = stopping.loss(embeddings, weights, columns)
            if teacher is not None:
                loss = loss + target.agreement * F.cross_entropy(teacher(images).float(), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        stopping.observe(embeddings, weights)
        move = get_ema_multi_avg_fn(min(0.99, (step + 1) / (step + 10)))
        move([*average.parameters()], [*generator.parameters()], step)
        progress(step + 1, config.steps)
    generator.load_state_dict(average.state_dict())
    recompute_batch_norm(generator, config.batch, priors if several else None, random)
    return generator.eval()


def block_of_steps(blocks: Sequence[int], steps: int) -> list[int]:
    """Return the argument `block` of `Generator.forward` for each step, from coarse to fine.

    blocks: the possible values, coarsest first. Half of the steps (all steps, if there is only one
    value) use the first value. The other steps are split equally between the other values.
    """
    coarse = steps if len(blocks) == 1 else round(0.5 * steps)
    finer = range(steps - coarse)
    return [blocks[0]] * coarse + [
        blocks[1 + step * (len(blocks) - 1) // len(finer)] for step in finer
    ]


def learning_rate_factor(progress: float) -> float:
    """Return the factor of the learning rate, in [0, 1], after the share `progress` of all steps.

    The factor rises briefly, then falls to zero along half a cosine wave. Without the rise, the
    first steps may turn all pixels black. The gradient would then be zero.
    """
    return min(1.0, (progress + 0.01) / 0.1) * (1 + math.cos(math.pi * progress)) / 2


def mismatch(embedding: Tensor, target: Tensor, weights: Tensor, priors: Tensor) -> Tensor:
    """Estimate ‖μ̃ − μ(G)‖² from a batch, without the constant ‖μ̃‖².

    The result is a weighted sum over the columns.

    The squared norm of a batch mean is a biased estimate of ‖μ(G)‖². Because ‖φ‖ = 1, the bias is
    known, and is subtracted; otherwise, small batches would reward images without variety. The
    squared error of column m, the column of class m, is divided by priors_m; otherwise, the weight
    of a rare class would be only priors_m². A column with fewer than two images is left out,
    because the variety of a class cannot be estimated from one image.

    embedding, target: (K, classes), μ(G) and μ̃; weights: (B, classes), from
    `labels_to_fit`.
    """
    counted = ((weights > 0).sum(0) > 1).to(priors)  # 0 for a class with fewer than two images
    # Effective number of images: with equal weights, this many would give the same variance.
    counts = weights.sum(0).square() / weights.square().sum(0).clamp(min=1e-12)
    # E‖mean of n unit vectors‖² = ‖μ‖² + (1 − ‖μ‖²)/n, so (n‖mean‖² − 1)/(n − 1) estimates ‖μ‖².
    # The constant 1/(n − 1) is left out.
    unbiased = counts / (counts - 1).clamp(min=1e-3)
    # The divisor has a floor, because the column of a very rare class is mostly noise
    balance = counted / priors.clamp(min=0.1 / len(priors))
    return (
        balance * (unbiased * embedding.square().sum(0) - 2 * (embedding * target).sum(0))
    ).sum()


class EarlyStopping:
    """Rule that stops the fit of a class when the generator begins to fit the noise of the release.

    Some features of a release, chosen by `held_out`, are left out of the loss. In these features,
    the rule observes the squared distance between the generator's embedding and the released one.
    The noise of these features is independent of the noise of the other features, so it adds only a
    constant to the expected distance. The distance falls while the fit learns the class, and rises
    when the fit learns the noise of the other features.

    Only steps with images of the class count. After PATIENCE such steps without a smaller distance,
    the fit of the class stops: its target becomes the moving average of the generator's embeddings,
    as it was at the step with the smallest distance.
    """

    # Decay of the moving average of the embeddings. The held-out features of this average are
    # compared with the release
    smooth = 0.98

    def __init__(self, matches: Sequence[FeatureMeans], seed: int, block: int = 1) -> None:
        random = torch.Generator().manual_seed(seed)
        self.matches = matches
        self.targets = [match.table.clone() for match in matches]
        # Two masks for each release, (K, 1) of 0 and 1: `seen` marks the features in the loss, and
        # `unseen` marks the held-out features. If a feature cannot be computed from means of
        # blocks with side `block`, both masks are 0.
        self.seen = []
        self.unseen = []
        for match in matches:
            out = held_out(match.features, random)
            active = match.features.active(block)
            self.seen.append((active & ~out).to(match.table)[:, None])
            self.unseen.append((active & out).to(match.table)[:, None])
        # μ(G), averaged over steps
        self.means = [torch.zeros_like(match.table) for match in matches]
        self.nearest = [torch.zeros_like(match.table) for match in matches]
        classes = matches[0].table.shape[1]
        # All tensors are on this device, so that no step waits for a copy
        device = matches[0].table.device
        self.least = torch.full((classes,), math.inf, device=device)
        self.waited = torch.zeros(classes, device=device)
        # Number of batches with images of each class
        self.batches = torch.zeros(classes, device=device)
        self.held = torch.zeros(classes, dtype=torch.bool, device=device)

    def loss(self, embeddings: Sequence[Tensor], weights: Tensor, priors: Tensor) -> Tensor:
        """Compute the loss: Σ weight · ‖target − μ(G)‖² over the features that are not held out.

        embeddings: μ(G) for each release, (K, classes).
        """
        parts = zip(self.matches, embeddings, self.targets, self.seen, strict=True)
        errors = (m.weight * mismatch(s * mean, s * t, weights, priors) for m, mean, t, s in parts)
        return sum(errors, torch.zeros(()))

    @torch.no_grad()
    def observe(self, embeddings: Sequence[Tensor], weights: Tensor) -> None:
        """Record the embeddings of a batch, and stop the fit of classes that no longer improve."""
        in_batch = weights.sum(0) > 0
        self.batches += in_batch
        part = torch.where(in_batch, (9 / (self.batches + 9)).clamp(min=1 - self.smooth), 0.0)
        distance = torch.zeros_like(self.least)
        for match, mean, embedding, unseen in zip(
            self.matches, self.means, embeddings, self.unseen, strict=True
        ):
            mean.lerp_(embedding, part.to(mean))
            distance += match.weight * (unseen * (mean.square() - 2 * mean * match.table)).sum(0)
        nearer = in_batch & ~self.held & (distance < self.least)
        self.least = torch.where(nearer, distance, self.least)
        self.waited = torch.where(nearer, 0, self.waited + in_batch)
        ends = ~self.held & (self.waited >= PATIENCE)
        for mean, nearest, target in zip(self.means, self.nearest, self.targets, strict=True):
            nearest.copy_(torch.where(nearer, mean, nearest))
            target.copy_(torch.where(ends, nearest, target))
        self.held |= ends


def held_out(features: FourierFeatures, random: torch.Generator) -> Tensor:
    """Choose about a fifth of the features of a release, (K,) bool, to leave out of the loss.

    The cosine and the sine of a frequency are left out together.
    """
    waves = torch.rand(features.frequencies, generator=random) < 0.2
    return torch.cat(
        [waves, waves, torch.rand(features.size - 2 * len(waves), generator=random) < 0.2]
    )


@torch.no_grad()
def recompute_batch_norm(
    generator: Generator, batch: int, priors: Tensor | None, random: torch.Generator
) -> None:
    """Recompute batch-norm statistics for the current weights, as means over 40 batches."""
    device = device_of(generator)
    for norm in generator.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.reset_running_stats()
            norm.momentum = None  # a plain mean over all batches
    generator.train()
    for _ in range(40):
        if priors is not None and generator.several:
            labels, _ = labels_to_fit(batch, priors, True, random)
        else:
            labels = balanced_labels(batch, priors, generator.classes, random)
        generator(
            torch.randn(batch, generator.latent, generator=random).to(device), labels.to(device)
        )


def balanced_labels(
    count: int, priors: Tensor | None, classes: int, random: torch.Generator
) -> Tensor:
    """Draw `count` labels in random order, (count,) int64, by systematic sampling.

    The number of labels of a class differs from `count` times its share by less than one. priors:
    (classes,) shares of the classes, or None for equal shares.
    """
    shares = (
        torch.full((classes,), 1 / classes, dtype=torch.float64)
        if priors is None
        else priors.double()
    )
    edges = (shares.cumsum(0) / shares.sum())[:-1].contiguous()
    points = (
        torch.arange(count, dtype=torch.float64)
        + torch.rand(1, generator=random, dtype=torch.float64)
    ) / count
    return torch.searchsorted(edges, points, right=True)[torch.randperm(count, generator=random)]


def several_labels(count: int, priors: Tensor, random: torch.Generator) -> Tensor:
    """Draw several labels for each of `count` images: (count, classes) uint8 of 0 and 1.

    The labels of an image are independent. priors: (classes,) share of images with each label. The
    number of images with a label differs from `count` times the label's share by less than one.
    """
    shares = torch.stack([1 - priors, priors], dim=1)
    return torch.stack([balanced_labels(count, share, 2, random) for share in shares], dim=1).to(
        torch.uint8
    )


def labels_to_draw(
    model: Any, count: int, priors: Tensor | None, random: torch.Generator
) -> Tensor:
    """Draw `count` labels of the kind that a model takes.

    If the model takes several labels per image, and there are priors, returns the result of
    `several_labels`. Otherwise, returns the result of `balanced_labels`.
    """
    if priors is not None and getattr(model, "several", False):
        return several_labels(count, priors, random)
    return balanced_labels(count, priors, model.classes, random)


def labels_to_fit(
    count: int, priors: Tensor, several: bool, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw labels for a batch, and weights of its images in the columns of the embedding.

    priors: see `fit_generator`.

    With one label per image, all classes are drawn equally often, so that rare classes are fitted
    too. If a batch is too small for two images of each class, it contains only some classes, chosen
    at random, with at least two images each (see `mismatch`). Returns labels, (count,) int64, and
    weights, which are one-hot rows, (count, classes) float32.

    With several labels per image, the batch is divided into strata: one per label, and one for
    images without labels. The strata are drawn like the classes above.
    An image in a label's stratum has this label, and its other labels are drawn by
    `several_labels`. So the stratum represents all images with this label. Returns labels, (count,
    classes) uint8, and weights, (count, classes + 1) float32. The weights of an image are its row
    of `label_rows`, with zeros in all columns except the column of its stratum.
    """
    classes = len(priors)
    stratum_count = classes + several
    drawn_count = min(stratum_count, max(1, count // 2))
    strata = balanced_labels(count, None, drawn_count, random)
    if drawn_count < stratum_count:
        strata = torch.randperm(stratum_count, generator=random)[strata]
    columns = F.one_hot(strata, stratum_count)
    if not several:
        return strata, columns.float()
    labels = several_labels(count, priors, random) | columns[:, :classes].to(torch.uint8)
    labels = labels * (strata < classes).to(torch.uint8)[:, None]
    return labels, (columns * label_rows(labels, classes)).float()


def drawing(
    generator: OneStep, count: int, priors: Tensor | None = None, seed: int = 0, spread: float = 1.0
) -> tuple[Iterator[Tensor], Tensor]:
    """Draw `count` images and their labels.

    priors: shares of the classes, or None for equal shares. If the generator takes several labels
    per image, priors are required;
    spread: standard deviation of the random inputs z.

    Returns an iterator over parts of the images, (N, C, H, W) float32 in [0, 1], and the labels of
    all images: (count,) int64, or the result of `several_labels`.
    """
    device = device_of(generator)
    random = torch.Generator().manual_seed(seed)
    labels = labels_to_draw(generator, count, priors, random)
    generator.eval()

    @torch.no_grad()
    def draw(part: Tensor) -> Tensor:
        z = spread * torch.randn(len(part), generator.latent, generator=random)
        return generator(z.to(device), part.to(device)).clamp(0, 1).cpu()

    larger = max(1, math.isqrt(math.prod(generator.shape[1:])) // COARSE)
    return map(draw, labels.split(max(1, DRAWING_BATCH // larger**2))), labels


def save_drawing(
    generator: OneStep,
    count: int,
    priors: Tensor,
    classes: Sequence[str],
    seed: int,
    directory: Path,
    label: Callable[[ImageSet], ImageSet] = lambda drawn: drawn,
) -> None:
    """Write the generator, `count` of its images, and a grid of the first 100 images as a picture.

    label: function that may change the labels of the images before they are written.
    """
    parts, labels = drawing(generator, count, priors, seed)
    channels, height, width = generator.shape
    images = room(count, (height, width, channels), directory)
    first = 0
    for part in parts:
        images[first : first + len(part)] = torch.from_numpy(as_uint8(part))
        first += len(part)
    save_generator(generator, directory)
    save_images(directory, label(ImageSet(images.numpy(), labels.numpy(), (*classes,))))
    save_png(directory / "grid.png", to_grid(as_floats(images[:100].permute(0, 3, 1, 2)), 10))


def save_generator(generator: OneStep, directory: Path) -> None:
    save_network(generator, generator.config(), directory, GENERATOR_WEIGHTS)


def built(**arguments: Any) -> OneStep:
    if "features" in arguments:
        return GaussianGenerator(**arguments)
    return Generator(**arguments)


def load_generator(directory: Path) -> OneStep:
    """Load the generator that `save_generator` wrote, in eval mode.

    Raises DataError if files are missing or damaged.
    """
    return (
        load_network(directory, built, "auxiliary", GENERATOR_WEIGHTS)
        .to(memory_format=torch.channels_last)
        .eval()
    )
