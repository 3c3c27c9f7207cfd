"""A release as a torch `Dataset`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


class ReleaseDataset(Dataset[tuple[Any, Any]]):
    """Pairs of an image, (C, H, W) float32 in [0, 1], and its label.

    `classes` and `targets` are as in torchvision.
    """

    def __init__(self, release: Any, transform: Callable[[Tensor], Any] | None) -> None:
        """Wrap a `Release`. transform: function applied to an image's tensor."""
        self.images = release.images
        self.targets = release.labels.tolist()
        self.classes = list(release.classes)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        pixels = torch.tensor(self.images[index]).permute(2, 0, 1).float() / 255
        target = self.targets[index]
        if isinstance(target, list):
            target = torch.tensor(target, dtype=torch.float32)
        if self.transform is not None:
            return self.transform(pixels), target
        return pixels, target
