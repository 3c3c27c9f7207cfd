"""Downstream accuracy: train a classifier on one set, score it on another (METHODS §9). Last epoch, no choice made on the scored images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.images import ImageSet
from sfumato.models.classifier import Classifier, build_classifier

BATCH = 128
MIN_STEPS = 600  # a small set is passed over more often, until it has had so many gradient steps
PEAK_RATE = {"lr": 1e-2, "mlp": 2e-3, "cnn": 4e-3}
WEIGHT_DECAY = {"lr": 1e-4, "mlp": 1e-4, "cnn": 1e-2}


def steps_of(count: int, epochs: int) -> int:
    """Gradient steps for `count` images: `epochs` passes, or MIN_STEPS if that is more."""
    return max(epochs * math.ceil(count / BATCH), MIN_STEPS)


def train_classifier(name: str, images: np.ndarray, labels: np.ndarray, classes: int, epochs: int, seed: int) -> Classifier:
    """Train `lr`, `mlp` or `cnn`: AdamW, one-cycle learning rate, shuffled passes, cross-entropy; no augmentation.

    images: (N, H, W, C) uint8; labels: (N,) integers below `classes`. `seed` fixes initialisation, order and dropout; the global
    generator is left as it was. Returns the model after its last step, in evaluation mode, on the device it was trained on.
    """
    if not len(images):
        raise ValueError(f"no images to train the {name} on")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_classifier(name, (images.shape[3], *images.shape[1:3]), classes).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE[name], weight_decay=WEIGHT_DECAY[name])
        steps = steps_of(len(images), epochs)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=PEAK_RATE[name], total_steps=steps, pct_start=0.2)
        targets = torch.from_numpy(np.array(labels, dtype=np.int64))
        order = torch.empty(0, dtype=torch.int64)
        model.train()
        for _ in range(steps):
            if not len(order):
                order = torch.randperm(len(images))
            index, order = order[:BATCH], order[BATCH:]
            if len(order) == 1:  # batch norm cannot train on one image
                order = order[:0]
            if len(index) == 1:
                index = index.repeat(2)
            with torch.autocast(device, torch.bfloat16, enabled=fast_bfloat16(device)):
                loss = F.cross_entropy(model(to_tensor(images[index.numpy()], device)), targets[index].to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def fast_bfloat16(device: str) -> bool:
    """Whether the device has bfloat16 arithmetic; told from the device, not timed, so that a machine always does the same."""
    return device == "cuda" or bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def to_tensor(images: np.ndarray, device: str) -> Tensor:
    """(B, H, W, C) uint8 -> (B, C, H, W) float32 in [0, 1]; stays channels-last in memory."""
    tensor = torch.from_numpy(np.array(images, order="C")).to(device).permute(0, 3, 1, 2)
    return tensor.float().div_(255)


@torch.no_grad()
def apply(function: Callable[[Tensor], Tensor], images: np.ndarray, device: str, size: int = 1000) -> np.ndarray:
    """`function` over (N, H, W, C) uint8 images in batches; returns its rows as one float32 array."""
    return np.concatenate([function(to_tensor(images[i : i + size], device)).float().cpu().numpy() for i in range(0, len(images), size)])


def predict(model: Classifier, images: np.ndarray) -> np.ndarray:
    """(N, H, W, C) uint8 -> (N,) int64, the most likely label of each."""
    return apply(model, images, next(model.parameters()).device.type).argmax(axis=1)


def accuracy(model: Classifier, image_set: ImageSet) -> float:
    """Share of `image_set` that the model labels right, in [0, 1]."""
    return float((predict(model, image_set.images) == image_set.labels).mean())


def score(name: str, train: ImageSet, holdout: ImageSet, epochs: int, seeds: Sequence[int]) -> dict:
    """Accuracy on `holdout` of classifiers trained on `train`, one per seed: {"mean", "std", "per_seed"}, as shares in [0, 1].

    `std` is the sample standard deviation, 0 for a single seed.
    """
    per_seed = [accuracy(train_classifier(name, train.images, train.labels, len(train.classes), epochs, seed), holdout) for seed in seeds]
    return {"mean": float(np.mean(per_seed)), "std": float(np.std(per_seed, ddof=1)) if len(per_seed) > 1 else 0.0, "per_seed": per_seed}


def cnn_features(model: Classifier, images: np.ndarray) -> np.ndarray:
    """(N, H, W, C) uint8 -> (N, 128) float32, what the last layer of the network sees.

    The space of the Fréchet distance. A network trained on real images is local, and so is everything computed with it.
    """
    return apply(model.features, images, next(model.parameters()).device.type)
