"""Measure speed and memory of per-image gradients, against the plain training step and Opacus.

    python benchmarks/dpsgd_speed.py [--passes 256] [--rounds 5] [--threads 1] [--opacus-rows 64]
        [--only bf16] [--size 28] [--channels 1] [--width 32] [--unshuffle 2] [--blocks 1]

Every variant makes the same number of image passes (forward and backward of one image at one noise
level) in the same process, in interleaved rounds, so that a busy machine slows all of them alike.
On one thread, CPU time is measured, which other processes do not affect. `images/s` is the number
of image passes per second in the best round. `ratio` is the median over rounds of the variant's
time divided by the plain step's time at the same precision. Peak memory is measured in one process
per variant, above the memory before the first step. The images are random, so nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, fields

import torch
from gradient_variants import Setting, opacus, ours, plain
from torch import nn

from sfumato.dpsgd.gradients import draw, per_image_gradients
from sfumato.runtime.compute import keep_freed_memory
from sfumato.settings.noise_levels import LogNormal

# Name -> (plain step to compare with, function that builds the step).
VARIANTS: dict[str, tuple[str, Callable[[Setting], Callable[[], object]]]] = {
    "plain fp32": ("plain fp32", lambda setting: plain(setting, False)),
    "plain bf16": ("plain bf16", lambda setting: plain(setting, True)),
    "ours K=1 fp32": ("plain fp32", lambda setting: ours(setting, 1, False)),
    "ours K=8 fp32": ("plain fp32", lambda setting: ours(setting, 8, False)),
    "ours K=1 bf16": ("plain bf16", lambda setting: ours(setting, 1, True)),
    "ours K=8 bf16": ("plain bf16", lambda setting: ours(setting, 8, True)),
    "Opacus K=1 fp32": ("plain fp32", lambda setting: opacus(setting, 1)),
    "Opacus K=8 fp32": ("plain fp32", lambda setting: opacus(setting, 8)),
}


def peak_memory(name: str, setting: Setting, threads: int) -> float:
    """Measure how many MiB the steps of this variant add to a process that runs nothing else."""
    command = [sys.executable, __file__, "--alone", name, "--threads", str(threads)]
    command += [part for key, value in asdict(setting).items() for part in (flag(key), str(value))]
    return float(
        subprocess.run(
            command, check=True, capture_output=True, text=True, env=os.environ
        ).stdout.split()[-1]
    )


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def run_alone(name: str, setting: Setting) -> None:
    step = VARIANTS[name][1](setting)
    before = high_water()
    for _ in range(2):
        step()
    print(high_water() - before)


def high_water() -> float:
    """Return the peak resident memory of this process in MiB.

    It is read from /proc (Linux only), because getrusage would include the parent's memory.
    """
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


def precision(setting: Setting, images: int = 32) -> None:
    """Print how much bfloat16 changes the direction of each image's gradient."""
    model, (x, y) = setting.network(), setting.data(images)
    for draws in (1, 8):
        drawn = draw(model, x, draws, LogNormal(), torch.Generator().manual_seed(0))
        parameters = dict(model.named_parameters())
        exact, rounded = (
            torch.cat(
                [
                    part.flatten(1)
                    for part in per_image_gradients(
                        model, parameters, x, y, drawn, autocast
                    ).values()
                ],
                dim=1,
            )
            for autocast in (False, True)
        )
        cosine = nn.functional.cosine_similarity(exact.double(), rounded.double())
        print(
            f"cosine of bf16 and fp32 gradients per image, K={draws}: "
            f"median {cosine.median():.5f}, worst {cosine.min():.5f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for field in fields(Setting):
        parser.add_argument(flag(field.name), type=int, default=field.default)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--only",
        default="",
        help="text in the names of the variants to measure; plain steps are always measured",
    )
    parser.add_argument("--alone", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    setting = Setting(**{field.name: getattr(options, field.name) for field in fields(Setting)})
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # the stages do this too; it speeds up every variant
    if options.alone:
        run_alone(options.alone, setting)
        return
    parameters = sum(value.numel() for value in setting.network().parameters())
    print(f"{parameters:,} parameters, {options.threads} thread(s), {setting}")
    variants = {
        name: variant
        for name, variant in VARIANTS.items()
        if name.startswith("plain") or options.only in name
    }
    steps = {name: make(setting) for name, (_, make) in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    clock = time.process_time if options.threads == 1 else time.perf_counter
    for name in [*steps, *list(steps) * options.rounds]:  # the first round warms up
        start = clock()
        steps[name]()
        times[name].append(clock() - start)
    print(f"{'variant':24}{'images/s':>10}{'ratio':>8}{'peak MiB':>10}")
    for name, (reference, _) in variants.items():
        own, theirs = times[name][1:], times[reference][1:]
        ratio = statistics.median(a / b for a, b in zip(own, theirs, strict=True))
        memory = peak_memory(name, setting, options.threads)
        print(f"{name:24}{setting.passes / min(own):10.0f}{ratio:8.2f}{memory:10.0f}")
    precision(setting)


if __name__ == "__main__":
    main()
