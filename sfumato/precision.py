"""bfloat16 where it is faster: measured, not guessed, because it depends on the processor and on the network."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import torch

GAIN = 1.15  # bfloat16 must be at least so much faster to be worth its rounding
REPEATS = 3

_measured: dict[Hashable, bool] = {}


def bfloat16_is_faster(step: Callable[[bool], object], key: Hashable, device: torch.device) -> bool:
    """Time `step(autocast)` both ways, alternating, and compare the best times. Cached per process under `key`.

    `step` must not touch sensitive images: times would tell of them.
    """
    if key not in _measured:
        best = {False: float("inf"), True: float("inf")}
        for repeat in range(REPEATS + 1):
            for autocast in (False, True):
                start = time.perf_counter()
                step(autocast)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if repeat:  # the first round warms up
                    best[autocast] = min(best[autocast], time.perf_counter() - start)
        _measured[key] = best[False] > GAIN * best[True]
    return _measured[key]
