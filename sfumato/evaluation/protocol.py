"""Seconds of a step of a classifier's training, on blank images: what `sfumato.planning.estimate` asks for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sfumato.evaluation.downstream import fit
from sfumato.planning.clock import seconds_of_further_steps
from sfumato.training.supervised import Schedule


def seconds_per_step(name: str, schedule: Schedule, shape: tuple[int, int, int], classes: int) -> float:
    """Seconds of one gradient step of a classifier's training, on blank images."""
    channels, height, width = shape
    blank = np.zeros((2 * schedule.batch, height, width, channels), dtype=np.uint8)
    labels = np.arange(len(blank)) % classes
    return seconds_of_further_steps(
        lambda steps: fit(name, blank, labels, classes, replace(schedule, steps=steps), seed=0)
    )
