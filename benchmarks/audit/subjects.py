"""Subjects of the audit: every query, and a step of DP-SGD.

They run on a few generated images, through the real charge. Each spends one use of a charge. An
audit compares releases of two sets, which differ by one image, the target. The target contributes
as much as the bound allows, so that the noise hides it as little as possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.diffusion.denoiser import Denoiser
from sfumato.dpsgd.gradients import Draws, Microbatch, clipped_gradient_sum
from sfumato.dpsgd.run import Gradients, State, step
from sfumato.features.fourier import FourierFeatures
from sfumato.features.public_network import ResNet
from sfumato.privacy.noise import NoiseSource
from sfumato.queries.central import query_central
from sfumato.queries.count import query_count
from sfumato.queries.feature_means import cosine_moments, moment_features, query_feature_means
from sfumato.queries.histogram import query_histogram
from sfumato.queries.saliency import query_saliency
from sfumato.queries.teacher import query_teacher
from sfumato.settings.dpsgd import Finetune, Saliency
from sfumato.settings.noise_levels import NoiseLevels
from sfumato.settings.queries import Central, FeatureMap, Teacher
from sfumato.settings.stages import BASELINES

SIDE, CLASSES = 8, 4
SHAPE = (1, SIDE, SIDE)
CLIP, DRAWS = 1e-2, 4  # clipping norm of DP-SGD, and number of draws per image


class PixelWeights(Denoiser):
    """A network with one weight per pixel. The gradient of an image is the negated image.

    So the contribution of each image is known, and an audit covers the complete engine: draws, mean
    over K, clip, sum and noise.

    Source: the Dirac canaries of Steinke, Nasr and Jagielski 2023.
    """

    channels, classes = 1, CLASSES

    def __init__(self, side: int = SIDE) -> None:
        super().__init__()
        self.resolution = side
        self.pixels = nn.Parameter(torch.zeros(1, side, side))

    def forward(self, images: Tensor, level: Tensor, labels: Tensor) -> Tensor:
        return (images * self.pixels).flatten(1).sum(1)

    def draw_levels(self, law: NoiseLevels, n: int, generator: torch.Generator) -> Tensor:
        return torch.rand(n, generator=generator, device=generator.device)

    def per_image_loss(
        self, images: Tensor, labels: Tensor, levels: Tensor, noise: Tensor
    ) -> Tensor:
        return -self(images, levels, labels)


def trainer(side: int = SIDE) -> State:
    """Build the state of DP-SGD on a `PixelWeights` network."""
    settings = Finetune(
        draws=DRAWS,
        max_grad_norm=CLIP,
        learning_rate=1e-6,
        microbatch_size=64 if side > SIDE else 4,
    )
    return State(PixelWeights(side), settings, public_batch=4.0, autocast=False)


@dataclass(frozen=True)
class Subject:
    """A query to audit.

    max_norm: Δ, the largest contribution of one image;
    spend: function that spends one use of a charge;
    encode: function from images to vectors, if the charge draws vectors; None if it draws images;
    noise: function that builds a source of noise with a planted bug, or None;
    planted: whether the query or its noise has a planted bug.
    """

    name: str
    max_norm: float
    spend: Callable[[Any], object]
    encode: Callable[[Tensor], Tensor] | None = None
    noise: Callable[[], NoiseSource] | None = None
    planted: bool = False


def unit_rows(images: Tensor) -> Tensor:
    rows = images.flatten(1)
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-6)


def subjects() -> list[Subject]:
    """List every query, and a step of DP-SGD."""
    torch.manual_seed(0)  # fixes the public networks and features
    network, pixels = ResNet(SHAPE, 5, width=4).eval(), PixelWeights()
    fourier = FourierFeatures(SHAPE, [FeatureMap()], 40, seed=0)
    cosine = cosine_moments(SHAPE, flip=False)
    sizes = torch.full((CLASSES,), 4.0, dtype=torch.float64)
    teacher = Teacher(learning_rate=1e-9, max_norm=0.5, steps=1)
    saliency = Saliency(max_norm=CLIP, microbatch_size=4)
    state, random = trainer(), torch.Generator().manual_seed(0)
    moments = moment_features(network)
    encode_moments = torch.no_grad()(moments.vectors)

    def teach(charge: Any) -> object:
        # one use of the charge per call
        once: Any = SimpleNamespace(sum=charge.sum, uses=1)
        return query_teacher(
            once, teacher, CLASSES, 4.0, torch.eye(SIDE**2), lambda done, total: None
        )

    def mapped(charge: Any, features: FourierFeatures) -> object:
        return query_feature_means(charge, features, CLASSES, 4.0, cached=True)

    def salient(charge: Any) -> object:
        trained = dict(pixels.named_parameters())
        gradients = Gradients(pixels, trained, saliency, 4.0, False, random)
        return query_saliency(charge, gradients)

    mean, mode = Central(repeats=1), Central(repeats=1, statistic="mode", bins=2)
    return [
        Subject("count", 1.0, lambda charge: query_count(charge, CLASSES)),
        Subject(
            "central, mean", float(SIDE), lambda charge: query_central(charge, sizes, SHAPE, mean)
        ),
        Subject(
            "central, mode", float(SIDE), lambda charge: query_central(charge, sizes, SHAPE, mode)
        ),
        Subject(
            "frequency", 1.0, lambda charge: query_feature_means(charge, fourier, CLASSES, 4.0)
        ),
        Subject(
            "covariance", 1.0, lambda charge: query_feature_means(charge, cosine, CLASSES, 4.0)
        ),
        Subject("histogram", 1.0, lambda charge: query_histogram(charge, network, 1)),
        Subject("teacher", 0.5, teach, unit_rows),
        Subject("embedding", 1.0, lambda charge: mapped(charge, fourier), fourier.vectors),
        Subject("moments", 1.0, lambda charge: mapped(charge, moments), encode_moments),
        *votes(),
        Subject("saliency", CLIP, salient),
        Subject("step of DP-SGD", CLIP, lambda charge: step(state, charge)),
    ]


def votes() -> list[Subject]:
    """List the query of Private Evolution, or nothing if the baselines were deleted."""
    if not BASELINES:
        return []
    from sfumato.baselines.private_evolution import query_votes

    candidates = unit_rows(torch.rand(24, *SHAPE))
    labels = torch.arange(24) % CLASSES  # six of each class
    return [
        Subject(
            "votes (evolve)",
            1.0,
            lambda charge: query_votes(charge, candidates, labels, CLASSES),
            unit_rows,
        )
    ]


# --- planted bugs, which an audit must find -------------------------------------------------------


class HalfNoise(NoiseSource):
    def gaussian(self, shape: tuple[int, ...], std: float) -> Tensor:
        return super().gaussian(shape, std / 2)


class NoiseOfTheFirstProcess(NoiseSource):
    """A source that returns zeros. It stands for the second of two processes.

    The planted bug is that only the first process adds noise, so the second releases exact sums.
    """

    def gaussian(self, shape: tuple[int, ...], std: float) -> Tensor:
        return super().gaussian(shape, std) * 0


def clip_each_draw(state: State, charge: Any) -> Tensor:
    """Run a step with a planted bug: the gradient of each of an image's K draws is clipped.

    Without the bug, only the mean of these gradients is clipped. With the bug, one image
    contributes up to K·C, where C is the clipping norm.
    """
    total = torch.zeros(state.size)
    part = Microbatch(DRAWS * state.microbatch_size)
    for images, labels in charge.batches(size=16):
        draws = state.draw(images)
        # (B·K, 1)
        alone = Draws(**{name: value.flatten(0, 1)[:, None] for name, value in vars(draws).items()})
        copies, own = images.repeat_interleave(DRAWS, 0), labels.repeat_interleave(DRAWS)
        total += clipped_gradient_sum(state.model, state.parameters, copies, own, alone, CLIP, part)
    released: Tensor = charge.release(total, CLIP)
    return released


def planted(known: Mapping[str, Subject]) -> list[Subject]:
    """List subjects with a planted bug. known: the subjects without a bug, by name."""
    count = known["count"].spend
    mean, clips = known["central, mean"].spend, partial(clip_each_draw, trainer())
    return [
        Subject("half the noise", 1.0, count, noise=HalfNoise, planted=True),
        Subject(
            "noise on one process", float(SIDE), mean, noise=NoiseOfTheFirstProcess, planted=True
        ),
        Subject(f"{DRAWS} draws of one image, each clipped", CLIP, clips, planted=True),
    ]


def made_images() -> tuple[Tensor, Tensor]:
    """Build three random images and, last, the target: a white image, with the largest norm."""
    random = torch.Generator().manual_seed(0)
    images = torch.rand(4, *SHAPE, generator=random) * 0.5
    images[-1] = 1.0
    return images, torch.tensor([0, 1, 2, 3])


def noise_of(mu: float) -> float:
    """Return the noise multiplier of a μ-GDP release."""
    return 1 / mu if mu > 0 else math.inf
