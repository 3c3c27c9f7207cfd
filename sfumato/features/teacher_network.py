"""The teacher, a linear classifier on public features, and the functions that use its predictions.

All of this is post-processing of a release: the teacher labels public and synthetic images, and
guides a sampler.
"""

import shutil
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.data.images import ImageSet, Shape, as_floats
from sfumato.diffusion.denoiser import Guide
from sfumato.features import OWN
from sfumato.features.projection import FEATURE_BATCH, ProjectedFeatures
from sfumato.features.public_network import PublicNetwork
from sfumato.runtime.compute import device, device_of
from sfumato.settings.queries import Teacher
from sfumato.storage.weights import load_network, save_network

FITTED = 10_000  # Maximum number of images to which features are fitted


class ImageClassifier(nn.Module):
    """A network from (B, C, H, W) float32 in [0, 1] to (B, classes) logits.

    several: whether images have several labels. If so, the sigmoid of each logit is a probability;
    shape: (C, H, W).
    """

    classes: int
    several: bool
    shape: Shape


class TeacherNetwork(ImageClassifier):
    """Linear layer on features ψ: (B, C, H, W) float32 in [0, 1] -> (B, classes) logits.

    The features are public and have norm 1.

    several: whether images have several labels. If so, an offset is added to each logit;
    features: arguments of `ProjectedFeatures`.
    """

    def __init__(self, classes: int, several: bool = False, **features: Any) -> None:
        super().__init__()
        self.classes = classes
        self.several = several
        if several:
            self.offsets = nn.Buffer(torch.zeros(classes))
        self.features = ProjectedFeatures(**features)
        self.shape = self.features.shape
        self.weights = nn.Buffer(torch.zeros(self.features.dimension, classes))

    @classmethod
    def of(
        cls, features: ProjectedFeatures, weights: Tensor, offsets: Tensor | None = None
    ) -> Self:
        """Build the teacher from features and released weights, (d, M).

        offsets: (M,), added to the logits, if images have several labels; otherwise None.
        """
        teacher = cls(weights.shape[1], **features.config(), several=offsets is not None)
        if offsets is not None:
            teacher.offsets.copy_(offsets)
        teacher.features.load_state_dict(features.state_dict())
        teacher.weights.copy_(weights)
        return teacher

    def forward(self, images: Tensor) -> Tensor:
        logits = self.features(images) @ self.weights
        if self.several:
            logits = logits + self.offsets
        return logits


@torch.no_grad()
def fit_features(
    settings: Teacher, shape: Shape, network: PublicNetwork | None, images: ImageSet, seed: int
) -> tuple[ProjectedFeatures, Tensor]:
    """Fit the features ψ to public or released images.

    network: network for the features "classifier" and "cells"; images: images to fit to. If there
    are more than FITTED images, `seed` determines which FITTED of them are used.

    Returns ψ, and the (d, d) covariance of ψ on these images, both on the device that stages use
    (`runtime.compute.device`).
    """
    own_network = settings.network and settings.network.arguments()
    arguments = settings.features or settings.feature, shape, settings.dimension
    features = ProjectedFeatures(*arguments, own_network or network, settings.flip).to(device())
    rows = features.fit(images.some(FITTED, seed), settings.power, seed).double()
    return features, rows.T @ rows / len(rows)


def classify(teacher: ImageClassifier, images: ImageSet) -> Tensor:
    """Compute class probabilities of images, (N, classes) float32, as `probabilities_of` does."""
    parts = torch.arange(len(images)).split(FEATURE_BATCH)
    return torch.cat([probabilities_of(teacher, images.batch(part.numpy())[0]) for part in parts])


@torch.no_grad()
def probabilities_of(teacher: ImageClassifier, images: Tensor) -> Tensor:
    """Compute class probabilities of images, (N, C, H, W) uint8, or float32 in [0, 1].

    With several labels, returns the probability of each label, so that rows need not add up to 1.
    """
    shares = torch.sigmoid if teacher.several else partial(torch.softmax, dim=1)
    teacher_device = device_of(teacher)
    parts = (
        as_floats(part).to(teacher_device) for part in images.split(FEATURE_BATCH) if len(part)
    )
    return torch.cat(
        [torch.zeros(0, teacher.classes), *(shares(teacher(part)).cpu() for part in parts)]
    )


def relabelled(teacher: TeacherNetwork, images: ImageSet) -> ImageSet:
    """Return public or released images with the teacher's labels instead of their own.

    The teacher's predictions are adjusted so that each class keeps its number of images, as far as
    possible (see `share_offsets`).
    """
    probabilities = classify(teacher, images)
    offsets = share_offsets(
        probabilities, torch.from_numpy(np.bincount(images.labels, minlength=len(images.classes)))
    )
    return ImageSet(
        images.images, at_shares(probabilities, offsets).argmax(dim=1).numpy(), images.classes
    )


def guide_by(teacher: TeacherNetwork, strength: float) -> Guide:
    """Build a guide that shifts a denoised image to raise the teacher's probability of its label.

    The shift is strength · variance · ∇ log p(label | image), with the variance of the clean image
    given its noisy version. With strength 1, the shift follows from Bayes' rule, if the teacher's
    probabilities are right, and if the variance is the same in all directions.
    """

    def guide(denoised: Tensor, labels: Tensor, variance: float) -> Tensor:
        with torch.enable_grad(), torch.autocast(denoised.device.type, enabled=False):
            at = denoised.detach().float().requires_grad_()
            likelihood = teacher((at + 1) / 2).log_softmax(dim=1).gather(1, labels[:, None]).sum()
            (slope,) = torch.autograd.grad(likelihood, at)
        return strength * variance * slope.to(denoised.dtype)

    return guide


def at_shares(probabilities: Tensor, offsets: Tensor) -> Tensor:
    """Adjust class probabilities by offsets to their logarithms; each row of the result has sum 1.

    probabilities: (N, M); offsets: (M,), from `share_offsets`. Returns (N, M) float64.
    """
    return (probabilities.double().clamp(min=1e-30).log() + offsets).softmax(dim=1)


# Temperatures of soft labels. Below 1, labels are more certain than the teacher.
TEMPERATURES = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True)
class Labelling:
    """Rule by which a teacher labels the images of a release.

    offsets: for each kind of image, the result of `share_offsets`, (M,). For a kind without an
    entry, the first entry is used;
    temperature: temperature of the soft labels, one of TEMPERATURES.
    """

    offsets: Mapping[str, Tensor]
    temperature: float = 1.0

    def soft(self, probabilities: Tensor, kind: str) -> Tensor:
        """Compute soft labels of images of one kind.

        probabilities: (N, M), from the teacher. Returns (N, M), each row with sum 1.
        """
        offsets = self.offsets.get(kind, next(iter(self.offsets.values())))
        return (
            at_shares(probabilities, offsets).clamp(min=1e-30).log() / self.temperature
        ).softmax(dim=1)


def best_temperature(shares: Tensor, labels: Tensor) -> float:
    """Return the temperature at which the requested classes are likeliest under the soft labels.

    shares: (N, M), probabilities from `at_shares`; labels: (N,) int64, requested classes, for which
    the images were drawn.
    """
    logs = shares.clamp(min=1e-30).log()
    losses = {each: float(F.cross_entropy(logs / each, labels)) for each in TEMPERATURES}
    return min(losses, key=lambda each: losses[each])


def share_offsets(probabilities: Tensor, target_counts: Tensor) -> Tensor:
    """Find offsets to add to log probabilities, so that class m is the likeliest class of
    `target_counts[m]` images.

    A noisy teacher predicts some classes too often and others hardly ever, but ranks the images of
    a class reliably. The search takes shorter and shorter steps, because the number of images per
    class changes in jumps.

    probabilities: (N, M); target_counts: (M,) numbers of images. Returns (M,) float64. Source:
    Saerens et al. 2002, who adjust probabilities to known shares of the classes.
    """
    offsets = torch.zeros(probabilities.shape[1], dtype=torch.float64)
    first, second = (
        probabilities.double().clamp(min=1e-30).log().topk(2, dim=1).values.unbind(dim=1)
    )
    unit = (first - second).mean()  # mean gap of the two largest
    steps = 200
    for step in range(steps):
        counts = at_shares(probabilities, offsets).argmax(dim=1).bincount(minlength=len(offsets))
        offsets += unit * (1 - step / steps) * ((target_counts + 1) / (counts + 1)).double().log()
    return offsets


def save_teacher(teacher: TeacherNetwork, directory: Path) -> None:
    config = {"classes": teacher.classes, **deepcopy(teacher.features.config())}
    for name, network in own_networks(config).items():
        shutil.copyfile(Path(network["path"]).expanduser(), directory / name)
        del network["path"]  # the owner's path is private
    if teacher.several:
        config["several"] = True
    save_network(teacher, config, directory)


def own_networks(config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the settings of each of the owner's networks that a teacher uses, by file name.

    The teacher uses one such network for each of its feature maps named OWN. The network is stored
    under the file name, beside the teacher's weights.
    """
    parts = config["feature"]
    if isinstance(parts, str):
        parts = [{"map": parts, "network": config["network"]}]
    networks = [part["network"] for part in parts if part["map"] == OWN]
    names = ("own-network", *(f"own-network-{number}" for number in range(2, len(networks) + 1)))
    return dict(zip(names, networks, strict=False))


def load_teacher_network(directory: Path) -> TeacherNetwork:
    """Load the teacher that `save_teacher` wrote, in eval mode.

    Raises DataError when files are missing or damaged.
    """

    def build(**arguments: Any) -> TeacherNetwork:
        for name, network in own_networks(arguments).items():
            network["path"] = str(directory / name)
        return TeacherNetwork(**arguments)

    return load_network(directory, build, "teacher").eval()
