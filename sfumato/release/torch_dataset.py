"""A release as a torch `Dataset`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

Item = tuple[Any, Any]  # the image, perhaps transformed, and its label


class ReleaseDataset(Dataset[Item]):
    """Pairs of an image, (C, H, W) float32 in [0, 1], and its label.

    `classes` and `targets` are as in torchvision.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        classes: Sequence[str],
        transform: Callable[[Tensor], object] | None,
    ) -> None:
        """Wrap the arrays of a `Release`. transform: function applied to an image's tensor."""
        self.images = images
        self.targets = labels.tolist()
        self.classes = list(classes)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Item:
        pixels = torch.tensor(self.images[index]).permute(2, 0, 1).float() / 255
        target = self.targets[index]
        if isinstance(target, list):
            target = torch.tensor(target, dtype=torch.float32)
        if self.transform is not None:
            return self.transform(pixels), target
        return pixels, target
