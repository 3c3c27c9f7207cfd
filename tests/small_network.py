"""A small U-Net with two resolutions and attention, and helpers for its tests."""

from typing import Any

import torch
from torch import Tensor

from sfumato.diffusion.unet import UNet, build_unet
from sfumato.generators.one_step import drawing

PLACES = ["down.0", "down.1", "middle.0", "up.0", "up.1"]
QKV = [f"{place}.attention.{part}.weight" for place in PLACES for part in "qkv"]
CHOSEN = [f"{place}.attention.{part}.weight" for place, part in zip(PLACES, "vqkkv", strict=True)]


def draw_images(generator, count, priors=None, seed=0):
    """Draw images with `drawing`, and join the parts that it yields. Returns images and labels."""
    parts, labels = drawing(generator, count, priors, seed)
    return torch.cat(list(parts)), labels


class OneDraw:
    """A stand-in for a charge that draws the same images each time."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def agree(self, *given: object) -> None:
        pass

    def batches(self, size: int, draws: int):
        yield from zip(self.images.split(size), self.labels.split(size), strict=True)


def perturbed(model: UNet, std: float = 0.1) -> UNet:
    """Add noise to a network's weights. Zero-initialised layers would hide most gradients."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(std * torch.randn_like(parameter))
    return model


def network(attention: tuple[int, ...] = (0, 1), seed: int = 0, **options: Any) -> UNet:
    torch.manual_seed(seed)
    return perturbed(
        build_unet(
            8, 1, 4, **{"width": 8, "multipliers": (1, 2), "attention": attention, **options}
        )
    )
