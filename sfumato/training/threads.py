"""Where to run: the device, and how many threads are worth having — measured, because threads that wait for a busy or shared core cost more than they bring."""

from __future__ import annotations

import os
import time

import torch
import torch.nn.functional as F

GAIN = 1.3  # all threads must be at least so much faster than one
ROUNDS = 4


def device() -> torch.device:
    """The first GPU, or the processor."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def settle_threads() -> int:
    """Let PyTorch use one thread, or all of its own, whichever runs small convolutions faster now. Returns the number.

    OMP_NUM_THREADS, where it is set, is the user's word and stays. On a machine whose cores are shared with another process, two
    threads were seen to be up to 25 times slower than one.
    """
    every = torch.get_num_threads()
    if every == 1 or os.environ.get("OMP_NUM_THREADS"):
        return every
    images, weight = torch.zeros(64, 64, 14, 14), torch.zeros(64, 64, 3, 3, requires_grad=True)
    slowest = {1: 0.0, every: 0.0}
    for turn in range(ROUNDS + 1):
        for threads in slowest:
            torch.set_num_threads(threads)
            start = time.perf_counter()
            for _ in range(3):
                F.silu(F.conv2d(images, weight, padding=1)).sum().backward()
            if turn:  # the first warms up; the slowest tells of other processes
                slowest[threads] = max(slowest[threads], time.perf_counter() - start)
    chosen = every if slowest[every] * GAIN < slowest[1] else 1
    torch.set_num_threads(chosen)
    return chosen
