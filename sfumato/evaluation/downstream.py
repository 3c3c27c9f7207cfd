"""Downstream accuracy: train a classifier on one set, score it on another (METHODS §9).

The model is that of the last epoch, or of the best one on a part of its training set. Scored images decide nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sfumato.data.images import ImageSet
from sfumato.diffusion.ema import EMA, ema_model
from sfumato.evaluation.classifiers import CLASSIFIERS, Classifier, build_classifier
from sfumato.runtime import compute
from sfumato.runtime.compute import fast_bfloat16
from sfumato.training.public_classifier import augment

BATCH = 128
MIN_STEPS = 600  # least gradient steps: a small set gets more passes
CHOSEN_ON = 2000  # at most this many images of the training set are kept to choose an epoch by


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How one classifier is trained.

    `size`: of the deep networks. `ema`: decay of the averaged weights, which are then the result; 0: no average.
    `kept`: part of the training set that is kept apart to choose the epoch by; 0: the last epoch is taken.
    """

    steps: int
    learning_rate: float
    weight_decay: float
    batch: int = BATCH
    one_cycle: bool = True  # AdamW at a rate that rises and falls; else Adam at a constant one
    size: str = "light"
    ema: float = 0.0
    kept: float = 0.0


def schedule_of(
    name: str, count: int, epochs: int, kind: str = "light", steps: int | None = None, kept: float = 0.0
) -> Schedule:
    """The schedule of classifier `name` on `count` images: `epochs` passes, or exactly `steps` gradient steps if given.

    kind: "light", for a CPU; "paper", for a GPU: the deep networks as DPImageBench trains them (Adam at 1e-4, batches
    of 512, 50 epochs, averaged weights). The papers print no schedule for `lr`, `mlp` and `cnn`: they have the light
    one in both.
    """
    spec = CLASSIFIERS[name]
    if kind == "paper" and spec.networks:
        return Schedule(
            steps=steps or 50 * math.ceil(count / 512),
            learning_rate=1e-4,
            weight_decay=0.0,
            batch=512,
            one_cycle=False,
            size="paper",
            ema=0.9999,
            kept=kept,
        )
    return Schedule(
        steps=steps or steps_of(count, epochs),
        learning_rate=spec.peak_learning_rate,
        weight_decay=spec.weight_decay,
        kept=kept,
    )


def steps_of(count: int, epochs: int) -> int:
    """Gradient steps for `count` images: `epochs` passes, or MIN_STEPS if that is more."""
    return max(epochs * math.ceil(count / BATCH), MIN_STEPS)


def train_classifier(
    name: str, images: np.ndarray, labels: np.ndarray, classes: int, epochs: int, seed: int
) -> Classifier:
    """`fit` under the light schedule, last epoch: the model, in evaluation mode."""
    return fit(name, images, labels, classes, schedule_of(name, len(images), epochs), seed)[0]


def fit(
    name: str, images: np.ndarray, labels: np.ndarray, classes: int, schedule: Schedule, seed: int
) -> tuple[Classifier, int]:
    """Train classifier `name`, one of CLASSIFIERS: shuffled passes, cross-entropy.

    images: (N, H, W, C) uint8; labels: (N,) integers below `classes`. `seed` fixes initialisation, order, dropout and
    the images kept apart; the global generator does not change. Returns (the model in evaluation mode, on the device it
    was trained on; its epoch, from 1). With `schedule.kept`, the epoch is the best one on the images kept apart, the
    later of equal ones.
    """
    if not len(images):
        raise ValueError(f"no images to train the {name} on")
    device = compute.device().type
    learnt, judged = kept_apart(len(images), schedule.kept, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_classifier(name, (images.shape[3], *images.shape[1:3]), classes, schedule.size).to(device)
        optimizer, rates = optimizer_of(model, schedule)
        average = EMA(dict(model.named_parameters()), schedule.ema) if schedule.ema else None
        targets = torch.from_numpy(np.array(labels, dtype=np.int64))
        order = torch.empty(0, dtype=torch.int64)
        epoch, best, best_epoch = 0, -1.0, 0
        taken: Classifier | None = None
        model.train()
        for step in range(schedule.steps):
            if not len(order):
                order, epoch = learnt[torch.randperm(len(learnt))], epoch + 1
            index, order = order[: schedule.batch], order[schedule.batch :]
            if len(order) == 1:  # batch norm cannot train on one image
                order = order[:0]
            if len(index) == 1:
                index = index.repeat(2)
            pixels = to_tensor(images[index.numpy()], device)
            if CLASSIFIERS[name].moved:
                pixels = augment(pixels, flip=images.shape[3] == 3)
            with torch.autocast(device, torch.bfloat16, enabled=fast_bfloat16(device)):
                loss = F.cross_entropy(model(pixels), targets[index].to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if rates:
                rates.step()
            if average:
                average.update(dict(model.named_parameters()))
            if len(judged) and (not len(order) or step == schedule.steps - 1):
                candidate = averaged(model, average)
                found = float((predict(candidate, images[judged]) == labels[judged]).mean())
                if found >= best:
                    best, best_epoch, taken = found, epoch, copy.deepcopy(candidate)
    if taken is not None:
        return taken.eval(), best_epoch
    return averaged(model, average).eval(), epoch


def kept_apart(count: int, part: float, seed: int) -> tuple[Tensor, np.ndarray]:
    """(indices to learn from, one or more; indices to choose the epoch by, none where `part` is 0)."""
    kept = min(round(part * count), CHOSEN_ON, count - 1)
    order = np.random.default_rng(seed).permutation(count) if kept else np.arange(count)
    return torch.from_numpy(order[kept:]), order[:kept]


def optimizer_of(
    model: Classifier, schedule: Schedule
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler | None]:
    kind = torch.optim.AdamW if schedule.one_cycle else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=schedule.learning_rate, weight_decay=schedule.weight_decay)
    if not schedule.one_cycle or schedule.steps <= 5:  # no room for a rise
        return optimizer, None
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=schedule.learning_rate, total_steps=schedule.steps, pct_start=0.2
    )


def averaged(model: Classifier, average: EMA | None) -> Classifier:
    """A copy of `model` with the averaged weights and its own batch-norm statistics; the model itself if no average."""
    return ema_model(copy.deepcopy(model), average.average) if average else model  # type: ignore[return-value]


def to_tensor(images: np.ndarray, device: str) -> Tensor:
    """(B, H, W, C) uint8 -> (B, C, H, W) float32 in [0, 1]; stays channels-last in memory."""
    tensor = torch.from_numpy(np.array(images, order="C")).to(device).permute(0, 3, 1, 2)
    return tensor.float().div_(255)


@torch.no_grad()
def apply(function: Callable[[Tensor], Tensor], images: np.ndarray, device: str, size: int = 1000) -> np.ndarray:
    """`function` over (N, H, W, C) uint8 images in batches; returns its rows as one float32 array."""
    return np.concatenate(
        [function(to_tensor(images[i : i + size], device)).float().cpu().numpy() for i in range(0, len(images), size)]
    )


def predict(model: Classifier, images: np.ndarray) -> np.ndarray:
    """(N, H, W, C) uint8 -> (N,) int64, the most likely label of each image."""
    return logits(model, images).argmax(axis=1)


def logits(model: Classifier, images: np.ndarray) -> np.ndarray:
    """(N, H, W, C) uint8 -> (N, classes) float32, in evaluation mode; the mode of the model does not change."""
    training = model.training
    try:
        return apply(model.eval(), images, next(model.parameters()).device.type)
    finally:
        model.train(training)


def accuracy(model: Classifier, image_set: ImageSet) -> float:
    """Share of `image_set` that the model labels right, in [0, 1]."""
    return float((predict(model, image_set.images) == image_set.labels).mean())


def per_class(predicted: np.ndarray, image_set: ImageSet) -> list[float | None]:
    """Share of each class's images in `image_set` that were labelled right; None for a class without images."""
    right = predicted == image_set.labels
    chosen = (image_set.labels == label for label in range(len(image_set.classes)))
    return [float(right[rows].mean()) if rows.any() else None for rows in chosen]


@dataclass(frozen=True)
class Judged:
    """One trained classifier on the hold-out: its accuracy, that of each class or None, and the epoch it was taken."""

    accuracy: float
    by_class: list[float | None]
    epoch: int


def judge(name: str, train: ImageSet, holdout: ImageSet, schedule: Schedule, seed: int) -> Judged:
    """Train a classifier on `train` and score it on `holdout`.

    Guarantee: no choice depends on `holdout`; it is used after training only.
    """
    model, epoch = fit(name, train.images, train.labels, len(train.classes), schedule, seed)
    predicted = predict(model, holdout.images)
    return Judged(float((predicted == holdout.labels).mean()), per_class(predicted, holdout), epoch)


def score(name: str, train: ImageSet, holdout: ImageSet, schedule: Schedule, seeds: Sequence[int]) -> dict:
    """Accuracy on `holdout` of classifiers trained on `train`, one per seed: as `summed_up` gives it."""
    if not seeds:
        raise ValueError("no seeds: one classifier or more must be trained")
    return summed_up([judge(name, train, holdout, schedule, seed) for seed in seeds], train.classes, schedule)


def summed_up(judged: Sequence[Judged], classes: Sequence[str], schedule: Schedule) -> dict:
    """The accuracies of classifiers of several seeds, as shares in [0, 1].

    Returns {"mean", "std", "per_seed", "per_class": [{"class", "mean", "std"}, …], "steps", "epochs": the one taken, by
    seed}. `std` is the sample standard deviation over the seeds, None for a single one. `per_class` leaves out a class
    that the hold-out lacks.
    """
    overall, epochs = [one.accuracy for one in judged], [one.epoch for one in judged]
    by_class = [
        {"class": name} | summary([one.by_class[i] for one in judged])
        for i, name in enumerate(classes)
        if judged[0].by_class[i] is not None
    ]
    return summary(overall) | {"per_seed": overall, "per_class": by_class, "steps": schedule.steps, "epochs": epochs}


def summary(values: Sequence) -> dict[str, float | None]:
    """{"mean", "std"}: the sample standard deviation, None for a single value, which says nothing of a spread."""
    return {"mean": float(np.mean(values)), "std": float(np.std(values, ddof=1)) if len(values) > 1 else None}
