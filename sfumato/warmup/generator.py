"""The auxiliary generator: fit it to the noisy frequency release, and draw images from it (FETA-Pro §3.3, DP-MERF).

Nothing here reads a sensitive image: the release was charged, and the fit is post-processing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.config import Auxiliary
from sfumato.data.images import Shape
from sfumato.features.fourier import FourierFeatures
from sfumato.warmup.generator_network import Generator
from sfumato.weights import load_network, save_network

WEIGHTS = "generator.safetensors"
DECAYS = 10  # how often a run multiplies the learning rate by `decay`
RARE = 0.1  # of an equal share: below it, a class's column is mostly noise and gets no more weight


def fit_generator(
    target: Tensor,
    features: FourierFeatures,
    config: Auxiliary,
    priors: Tensor,
    shape: Shape,
    classes: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> Generator:
    """Train G so that its joint embedding matches the released one: Adam on the squared norm ‖μ̃ − μ(G)‖².

    target: (K, classes), the noisy release over N̄; features: the φ that made it; priors: (classes,) public label
    shares, summing to 1; shape: (C, H, W), square; progress: called with (steps done, steps).
    Returns the generator in eval mode.

    Column m of μ(G) is priors_m times the mean of φ over the images of class m, under any law of the labels: uniform
    labels give every class the same number of images per batch, prior labels follow `priors`.
    Because ‖φ‖ = 1, the bias of the squared norm of a batch mean is a known factor, n/(n − 1). The loss removes it:
    otherwise small batches reward images that are all alike.
    The loss divides each column's error by its prior. Equal classes keep their balance, and a rare class still counts
    (its error would otherwise weigh priors_m²).
    """
    channels, resolution, across = shape
    if resolution != across:
        raise ValueError(f"shape={shape}: the generator draws square images; resize the set (data.size)")
    if target.shape != (features.size, classes):
        raise ValueError(
            f"target of shape {tuple(target.shape)}: expected {(features.size, classes)}, "
            "its own features' size × classes"
        )
    random = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        generator = Generator(resolution, channels, classes, config.latent, config.width).to(target.device)
    features = features.to(target.device)
    priors = priors.to(target)
    optimizer = torch.optim.Adam(generator.parameters(), lr=config.learning_rate)
    decay_every = max(1, -(-config.steps // DECAYS))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, decay_every, gamma=config.decay)
    balance = 1 / priors.clamp(min=RARE / classes)

    for step in range(config.steps):
        labels = balanced_labels(config.batch, priors.cpu() if config.labels == "prior" else None, classes, random).to(
            target.device
        )
        z = torch.randn(config.batch, config.latent, generator=random).to(target.device)
        onehot = F.one_hot(labels, classes).to(target)
        counts = onehot.sum(0).clamp(min=1)

        # bf16 inside the network and the phases, float32 for the embedding and the loss
        with torch.autocast(target.device.type, torch.bfloat16):
            images = generator(z, labels)
            embedding = features.embed(images, onehot * (priors / counts))  # (K, classes)
        shown = (onehot.sum(0) > 0).to(target)  # a class without images in the batch has no gradient
        # E‖mean of n unit vectors‖² = ‖μ‖² + (1 − ‖μ‖²)/n, so (n‖mean‖² − 1)/(n − 1) estimates ‖μ‖²; drop the constant
        unbiased = torch.where(counts > 1, counts / (counts - 1).clamp(min=1), 1.0)
        loss = (shown * balance * (unbiased * embedding.square().sum(0) - 2 * (embedding * target).sum(0))).sum()

        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(step + 1, config.steps)
    return generator.eval()


def balanced_labels(count: int, priors: Tensor | None, classes: int, random: torch.Generator) -> Tensor:
    """`count` labels with each class as near to its share as whole numbers allow, in random order: (count,) int64.

    priors: (classes,) shares, or None for equal ones. Systematic sampling with one uniform offset: each class has its
    share in expectation too.
    """
    shares = torch.full((classes,), 1 / classes, dtype=torch.float64) if priors is None else priors.double()
    edges = (shares.cumsum(0) / shares.sum())[:-1].contiguous()
    points = (torch.arange(count, dtype=torch.float64) + torch.rand(1, generator=random, dtype=torch.float64)) / count
    return torch.searchsorted(edges, points, right=True)[torch.randperm(count, generator=random)]


@torch.no_grad()
def draw_images(
    generator: Generator, count: int, priors: Tensor | None = None, seed: int = 0, batch: int = 1000
) -> tuple[Tensor, Tensor]:
    """`count` images, (N, C, H, W) float32 in [0, 1], and labels, (N,) int64. priors: label shares, None: uniform."""
    device = next(generator.parameters()).device
    random = torch.Generator().manual_seed(seed)
    labels = balanced_labels(count, priors, generator.classes, random)
    generator.eval()
    rows = []
    for part in labels.split(batch):
        z = torch.randn(len(part), generator.latent, generator=random)
        rows.append(generator(z.to(device), part.to(device)).cpu())
    return torch.cat(rows) if rows else torch.zeros(
        0, generator.channels, generator.resolution, generator.resolution
    ), labels


def save_generator(generator: Generator, directory: Path) -> None:
    """Write `generator.safetensors` and `config.json`."""
    save_network(generator, generator.config(), directory, WEIGHTS)


def load_generator(directory: Path) -> Generator:
    """The generator that `save_generator` wrote, in eval mode. Raises DataError when files are missing or damaged."""
    return load_network(directory, Generator, "auxiliary", WEIGHTS).eval()
