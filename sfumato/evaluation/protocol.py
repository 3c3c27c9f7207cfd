"""Seconds of a step of a classifier's training, on blank images: what `sfumato.planning.estimate` asks for."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from sfumato.evaluation.downstream import fit
from sfumato.training.supervised import Schedule


def seconds_per_step(name: str, schedule: Schedule, shape: tuple[int, int, int], classes: int) -> float:
    """Seconds of one gradient step: of three steps, less those of one. The first training is not counted."""
    channels, height, width = shape
    blank = np.zeros((2 * schedule.batch, height, width, channels), dtype=np.uint8)
    labels, took = np.arange(len(blank)) % classes, []
    for steps in (1, 1, 3):
        start = time.perf_counter()
        fit(name, blank, labels, classes, replace(schedule, steps=steps), seed=0)
        took.append(time.perf_counter() - start)
    return max(took[2] - took[1], 1e-6) / 2
