"""Measuring how long work takes here, on blank images, and remembering it: the clock, and a file in the state."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from pydantic_core import to_jsonable_python

from sfumato.errors import UNREADABLE
from sfumato.runtime.compute import device
from sfumato.storage.digest import digest_of
from sfumato.storage.documents import read_json
from sfumato.storage.files import replace_file

TIMINGS = Path("cache") / "timings.json"  # below the state directory
LEAST, PROBE = 0.1, 0.5  # seconds that a measurement lasts at least, and the look at what else the machine does
STEPS, LONG = 2, 0.3  # of a training that are timed; seconds after which one step is enough
SLOW = 5.0  # seconds of one step after which no other is timed
STARTS = (
    "import torch, sfumato.planning.resolve, sfumato.generators.one_step, sfumato.privacy.authorize, "
    "sfumato.evaluation.downstream"
)
Told = Callable[[int, int], None]  # of steps done, and of how many


class Timings:
    """Seconds of one step of each kind of work, by what decides them; kept in a file where there is a state directory.

    fresh: measure everything anew, as it is now.
    """

    def __init__(self, state: Path | None = None, fresh: bool = False) -> None:
        self.path, self.machine = state / TIMINGS if state is not None else None, machine_of()
        self.known: dict[str, list[float]] = {}
        if self.path is not None and not fresh:
            with suppress(*UNREADABLE):
                content = read_json(self.path)
                self.known = dict(content["seconds"]) if content["machine"] == self.machine else {}

    def of(self, what: str, decides: Mapping[str, Any], measure: Callable[[], list[float]]) -> list[float]:
        """What `measure` found, now or earlier, for the same `decides`."""
        key = f"{what} {digest_of(to_jsonable_python(decides))[:16]}"
        if key not in self.known:
            self.known[key] = [float(value) for value in measure()]
            if self.path is not None and self.path.parent.parent.is_dir():
                self.path.parent.mkdir(mode=0o700, exist_ok=True)
                content = {"machine": self.machine, "seconds": self.known}
                replace_file(self.path, json.dumps(content, indent=1).encode())
        return self.known[key]


def machine_of() -> dict[str, Any]:
    """What the times depend on besides the work."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    processor = [platform.machine(), platform.node(), torch.get_num_threads(), on_one_thread()]
    return {"processor": processor, "gpu": gpu, "torch": torch.__version__}


def on_one_thread() -> bool:
    return torch.get_num_threads() == 1 and not torch.cuda.is_available()


def now() -> float:
    """The clock of all measurements: processor time where one thread does the work, so that others count little.

    Elsewhere it is the time that passes. `stretch` says what other programs do to a stage of one thread.
    """
    if on_one_thread():
        return time.process_time()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def stretch() -> float:
    """How many times longer one thread takes now than its own processor time: 1 on an idle machine."""
    if not on_one_thread():
        return 1.0
    matrix = torch.rand(512, 512)
    wall, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < PROBE:
        matrix = (matrix @ matrix).clamp(0, 1)
    return max(1.0, (time.perf_counter() - wall) / max(time.process_time() - used, 1e-3))


class Enough(Exception):
    """Stops a training that was timed long enough."""


def seconds_of_steps(train: Callable[[Told], object]) -> float:
    """Seconds of a step of a training, which is stopped after a few, long ones after one; the first is not counted."""
    stamps: list[float] = []

    def told(done: int, total: int) -> None:
        stamps.append(now())
        if done > STEPS or stamps[-1] - stamps[0] > LONG:
            raise Enough

    with suppress(Enough):
        train(told)
    return median(np.diff(stamps))


def seconds_of_further_steps(train: Callable[[int], object]) -> float:
    """Seconds of a step of a training of a given number of steps, less what it takes to begin, but of a slow one."""
    took: list[float] = []
    for steps in (1, 1, 1 + STEPS):  # the first is not counted
        start = now()
        train(steps)
        took.append(now() - start)
        if took[0] > SLOW:
            return took[0]
    return max(took[2] - took[1], 1e-6) / STEPS


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of one call: the median of several, the first of which is not counted."""
    work()
    took: list[float] = []
    begun = now()
    while not took or now() - begun < LEAST:
        start = now()
        work()
        took.append(now() - start)
    return median(took)


def rate_of_products(kind: torch.dtype) -> float:
    """Operations a second of a product of matrices."""
    size = 1024
    matrix = torch.rand(size, size, dtype=kind, device=device())
    return 2 * size**3 / seconds_of(lambda: matrix @ matrix)


def start_of_a_program() -> list[float]:
    """Seconds of processor time of a program that imports what a stage does."""
    before = os.times()
    subprocess.run([sys.executable, "-c", STARTS], check=False, capture_output=True)
    after = os.times()
    return [after.children_user - before.children_user + after.children_system - before.children_system]
