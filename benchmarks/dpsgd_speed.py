"""Speed and memory of per-image gradients, against the plain training step and against Opacus.

    python benchmarks/dpsgd_speed.py [--passes 256] [--rounds 5] [--threads 1] [--width 28] [--opacus-rows 64]

Every variant makes the same number of image passes (forward and backward of one image at one noise level) in the same
process, in interleaved rounds, so that a busy machine slows all of them; on one thread, CPU time is measured, which other processes
do not count in. `images/s` is the best round; `ratio` is the time over that of the plain step of the same precision, the median over
rounds. Peak memory, over what was held before the first step, is measured in a process per variant. Random images: nothing to download.
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

import torch
from torch import Tensor, nn

from sfumato.config import LogNormal
from sfumato.diffusion.objective import draw_noise_levels, per_image_loss
from sfumato.models.unet import GroupNorm, UNet
from sfumato.training.dpsgd import choose_chunk, clipped_gradient_sum, draw, per_image_gradients

CLIP = 1e-3
WIDTH = 28  # channels of the finest level
OPACUS_ROWS = 64  # rows whose gradients Opacus holds at a time


def network() -> UNet:
    torch.manual_seed(0)
    model = UNet(28, 1, 10, width=WIDTH, multipliers=(2, 2), attention=(1,), unshuffle=2)
    with torch.no_grad():
        for parameter in model.parameters():  # off the zero initialisation, where most gradients vanish
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def data(images: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(images, 1, 28, 28, generator=generator), torch.randint(10, (images,), generator=generator)


def plain(passes: int, autocast: bool) -> Callable[[], object]:
    """An ordinary training step's gradient."""
    model, (images, labels), generator = network(), data(passes), torch.Generator().manual_seed(0)
    parameters = list(model.parameters())

    def step() -> object:
        sigma, noise = draw_noise_levels(LogNormal(), passes, generator), torch.randn(images.shape, generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = per_image_loss(model, images, labels, sigma, noise).mean()
        return torch.autograd.grad(loss, parameters)

    return step


def ours(passes: int, draws: int, autocast: bool) -> Callable[[], object]:
    """Draws, per-image gradients, clip and sum, as DP-SGD does them."""
    model, (images, labels), generator = network(), data(passes // draws), torch.Generator().manual_seed(0)
    parameters = dict(model.named_parameters())
    chunk = choose_chunk(sum(value.numel() for value in parameters.values()), draws)
    return lambda: clipped_gradient_sum(
        model, parameters, images, labels, draw(images, draws, LogNormal(), generator), CLIP, chunk, autocast
    )


def opacus(passes: int, draws: int) -> Callable[[], object]:
    """Opacus' hooks, on modules it has rules for; K draws as K rows whose gradients are averaged before the clip."""
    from opacus.grad_sample import GradSampleModule

    model = network()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, GroupNorm):
                setattr(module, name, nn.GroupNorm(child.groups, child.channels, affine=child.affine))
    wrapped = GradSampleModule(model)
    images, labels = (tensor.repeat_interleave(draws, 0) for tensor in data(passes // draws))
    generator = torch.Generator().manual_seed(0)
    parameters = list(wrapped.parameters())

    def step() -> Tensor:
        total = torch.zeros(sum(value.numel() for value in parameters))
        for x, y in zip(images.split(OPACUS_ROWS), labels.split(OPACUS_ROWS), strict=True):
            sigma, noise = draw_noise_levels(LogNormal(), len(x), generator), torch.randn(x.shape, generator=generator)
            per_image_loss(wrapped, x, y, sigma, noise).mean().backward()
            rows = torch.cat([value.grad_sample.unflatten(0, (-1, draws)).mean(1).flatten(1) for value in parameters], dim=1)
            total += (CLIP / (rows.norm(dim=1) + 1e-6)).clamp(max=1) @ rows
            wrapped.zero_grad()
        return total

    return step


VARIANTS: dict[str, tuple[str, Callable[[int], Callable[[], object]]]] = {  # name -> plain step to compare with, maker
    "plain fp32": ("plain fp32", lambda passes: plain(passes, False)),
    "plain bf16": ("plain bf16", lambda passes: plain(passes, True)),
    "ours K=1 fp32": ("plain fp32", lambda passes: ours(passes, 1, False)),
    "ours K=8 fp32": ("plain fp32", lambda passes: ours(passes, 8, False)),
    "ours K=1 bf16": ("plain bf16", lambda passes: ours(passes, 1, True)),
    "ours K=8 bf16": ("plain bf16", lambda passes: ours(passes, 8, True)),
    "Opacus hooks K=1 fp32": ("plain fp32", lambda passes: opacus(passes, 1)),
    "Opacus hooks K=8 fp32": ("plain fp32", lambda passes: opacus(passes, 8)),
}


def peak_memory(name: str, passes: int, threads: int) -> float:
    """MiB that a process running this variant alone adds to what it held before the first step."""
    command = [sys.executable, __file__, "--alone", name, "--passes", str(passes), "--threads", str(threads)]
    command += ["--width", str(WIDTH), "--opacus-rows", str(OPACUS_ROWS)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout.split()[-1])


def run_alone(name: str, passes: int) -> None:
    step = VARIANTS[name][1](passes)
    before = high_water()
    for _ in range(2):
        step()
    print(high_water() - before)


def high_water() -> float:
    """Peak resident memory of this process in MiB (Linux; getrusage would count the parent's)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


def precision(images: int = 32) -> None:
    """How far bfloat16 turns each image's gradient."""
    model, (x, y) = network(), data(images)
    for draws in (1, 8):
        drawn = draw(x, draws, LogNormal(), torch.Generator().manual_seed(0))
        parameters = dict(model.named_parameters())
        exact, rounded = (
            torch.cat([part.flatten(1) for part in per_image_gradients(model, parameters, x, y, drawn, autocast).values()], dim=1)
            for autocast in (False, True)
        )
        cosine = nn.functional.cosine_similarity(exact, rounded)
        print(f"cosine of bf16 and fp32 gradients per image, K={draws}: median {cosine.median():.5f}, worst {cosine.min():.5f}")


def main() -> None:
    global WIDTH, OPACUS_ROWS
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--passes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--opacus-rows", type=int, default=OPACUS_ROWS)
    parser.add_argument("--alone", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    WIDTH, OPACUS_ROWS = options.width, options.opacus_rows
    if options.alone:
        run_alone(options.alone, options.passes)
        return
    parameters = sum(value.numel() for value in network().parameters())
    print(f"{parameters:,} parameters, 28x28, width {WIDTH}, unshuffle 2, {options.passes} image passes, {options.threads} thread(s)")
    steps = {name: make(options.passes) for name, (_, make) in VARIANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    clock = time.process_time if options.threads == 1 else time.perf_counter
    for name in [*steps, *list(steps) * options.rounds]:  # the first round warms up
        start = clock()
        steps[name]()
        times[name].append(clock() - start)
    print(f"{'variant':24}{'images/s':>10}{'ratio':>8}{'peak MiB':>10}")
    for name, (reference, _) in VARIANTS.items():
        own, theirs = times[name][1:], times[reference][1:]
        ratio = statistics.median(a / b for a, b in zip(own, theirs, strict=True))
        memory = peak_memory(name, options.passes, options.threads)
        print(f"{name:24}{options.passes / min(own):10.0f}{ratio:8.2f}{memory:10.0f}")
    precision()


if __name__ == "__main__":
    main()
