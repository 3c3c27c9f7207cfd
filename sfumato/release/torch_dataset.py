"""A release as a torch `Dataset`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class ReleaseDataset(Dataset[tuple[Any, Any]]):
    """Pairs of an image, (C, H, W) float32 in [0, 1], and its label; `classes` and `targets` as in torchvision."""

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        classes: Sequence[str],
        transform: Callable[[Tensor], Any] | None = None,
    ) -> None:
        """images: (N, H, W, C) uint8; labels: (N,), or (N, classes) of 0 and 1, with `classes` the names."""
        self.images = images
        self.targets = labels.tolist()
        self.classes = list(classes)
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
