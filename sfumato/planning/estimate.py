"""Estimate how long each stage takes on this machine when it is idle.

The estimate is the number of operations of the stage's networks, counted on one blank image,
divided by the speed of this machine. The speed is measured once per machine with a small reference
network, in processor time of one thread, so that other programs have little effect. The estimate of
a free stage is corrected by the duration of the stage's last run. Durations of queries depend on
sensitive draws, so they are not stored.
"""

import platform
import time
import timeit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sfumato.data.images import Shape
from sfumato.errors import UNREADABLE
from sfumato.planning.work import Work, operations_of
from sfumato.privacy.resolved import StagePlan
from sfumato.runtime import distributed
from sfumato.runtime.compute import THREADS, device, fast_bfloat16, one_thread
from sfumato.settings.fields import Settings
from sfumato.settings.params import Params
from sfumato.settings.stages import STAGES
from sfumato.storage.documents import read_json
from sfumato.storage.files import json_text, replace_private

DURATIONS = Path("cache") / "durations.json"  # path in the state directory
# Commands that run in every project, and are not stages of a recipe
FRAME = ("prepare sensitive", "prepare public", "plan", "ledger", "report")
START = 8.0  # seconds that DVC, imports and writing an artifact add to a stage


def now() -> float:
    """Return the time in seconds: processor time if one thread works, otherwise wall time."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def gain(threads: int) -> float:
    """Estimate the speed-up by several threads: the square root of their number, or 1 on a GPU."""
    if device().type == "cuda":
        return 1.0
    return threads**0.5


@cache
def operations_per_second() -> float:
    """Measure the speed of one thread: run a convolution and a matrix product several times, and
    use the fastest run.
    """
    layers = [
        nn.Conv2d(64, 64, 3, padding=1),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 576),
    ]
    # Counted before the layers are moved to the device, because `operations_of` uses the CPU
    operations = operations_of(partial(nn.Sequential, *layers), (64, 14, 14))
    network = nn.Sequential(*layers).to(device())
    images = torch.rand(64, 64, 14, 14, device=device())
    with (
        torch.no_grad(),
        torch.autocast(device().type, torch.bfloat16, enabled=fast_bfloat16(device().type)),
    ):
        best = min(timeit.repeat(lambda: network(images), timer=now, number=1, repeat=20))
    return len(images) * operations / best


class Machine:
    """The speed of this machine and the last duration of each free stage, stored in the state
    directory.
    """

    def __init__(self, state: Path) -> None:
        name = torch.cuda.get_device_name() if device().type == "cuda" else platform.machine()
        identity = [platform.node(), name, THREADS, torch.__version__, "operations"]
        self.path = state / DURATIONS
        self.content: dict[str, Any] = {"machine": identity, "runs": {}}
        with suppress(*UNREADABLE):
            stored_content = dict(read_json(self.path))
            if stored_content.get("machine") == identity:
                self.content = stored_content

    def write(self) -> None:
        if self.path.parent.parent.is_dir():
            replace_private(self.path, json_text(self.content).encode())

    def seconds(self, operations: float) -> float:
        if "speed" not in self.content:
            self.content["speed"] = operations_per_second()
            self.write()
        return operations / (float(self.content["speed"]) * gain(THREADS))


def expected_seconds(
    params: Params, shape: Shape, classes: int, state: Path, public_images: int = 0
) -> dict[str, float | None]:
    """Estimate the seconds of each stage and of the commands that every project runs, by name.

    The value is None for a stage whose duration cannot be estimated yet. The number of images is
    taken from `privacy.size_hint`, never from a private count.

    shape: (C, H, W) of an image; public_images: number of public images, if a stage reads them;
    state: the private state directory.
    """
    machine = Machine(state)
    work = Work(params, shape, classes, public_images)
    # For a stage that is off, DVC takes about one second
    stage_seconds: dict[str, float | None] = dict.fromkeys(STAGES, 1.0)
    # `corrected_seconds` may measure the machine's speed. This needs one thread: several threads
    # would wait for each other while other programs run
    with one_thread():
        for name in filter(params.runs, STAGES):
            seconds = corrected_seconds(name, work, machine)
            stage_seconds[name] = None if seconds is None else START + seconds
    return {**stage_seconds, **dict.fromkeys(FRAME, START)}


def seconds_of_plans(plans: Mapping[str, StagePlan[Any]], state: Path) -> dict[str, float | None]:
    """Estimate the seconds of each stage, as `expected_seconds` does, from the plans of all stages.

    plans: plan of each stage by name.
    """
    images = plans["synthesize"]
    network: object = next((plan.model for plan in plans.values() if plan.model), {})
    params = Params.model_validate(
        {name: plan.settings for name, plan in plans.items()}
        | {
            "run": tuple(name for name, plan in plans.items() if plan.enabled),
            "model": network,
            "privacy": {"size_hint": images.size_hint},
        }
    )
    return expected_seconds(params, images.shape, len(images.classes), state)


def corrected_seconds(name: str, work: Work, machine: Machine) -> float | None:
    """Estimate a stage's seconds, and correct the estimate by the stage's last run.

    The correction is a factor: the real duration of the last run, divided by its estimated
    duration. There is no correction if that estimated duration is 1 second or less, or if the
    factor is not between 1/4 and 4. If the stage's work is unknown, the last run's duration is
    returned, or None if there is no such run. A run with another image shape or model is ignored.
    """
    run = machine.content["runs"].get(name, {})
    same_model = run.get("model") in (None, work.params.model.non_default())
    last_work = None
    if run.get("shape") == list(work.shape) and same_model:
        with suppress(*UNREADABLE):  # Another version may have written the settings
            settings = STAGES[name].settings.model_validate(run["settings"])
            last_work = replace(work, params=work.params.model_copy(update={name: settings}))
    operations = work.of(name)
    if operations is None:
        if not last_work:
            return None
        return float(run["seconds"])
    seconds = machine.seconds(operations)
    if last_work is None:
        return seconds
    last_estimate = machine.seconds(last_work.of(name) or 0.0)
    # A factor outside these bounds means that the stage was resumed, or that other programs ran
    if last_estimate > 1 and 1 / 4.0 < run["seconds"] / last_estimate < 4.0:
        return seconds * run["seconds"] / last_estimate
    return seconds


@contextmanager
def timed(state: Path, plan: StagePlan[Settings]) -> Iterator[None]:
    """Store the duration of a free stage, rounded to two digits, if the stage succeeds.

    If there are several processes, only the first one stores the duration. It is written to the
    private state directory, together with the settings that determine it.
    """
    begun = now()
    yield
    seconds = (now() - begun) * gain(torch.get_num_threads()) / gain(THREADS)
    if distributed.is_main():
        machine = Machine(state)
        machine.content["runs"][plan.stage] = {
            "seconds": float(f"{seconds:.1e}"),
            "settings": plan.settings.model_dump(mode="json"),
            "shape": list(plan.shape),
            "model": plan.model and plan.model.non_default(),
        }
        with suppress(OSError):
            machine.write()
