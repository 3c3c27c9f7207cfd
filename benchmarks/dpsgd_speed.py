"""Speed and memory of per-image gradients, against the plain training step and against Opacus.

    python benchmarks/dpsgd_speed.py [--passes 256] [--rounds 5] [--threads 1] [--opacus-rows 64] [--only bf16]
        [--size 28] [--channels 1] [--width 32] [--unshuffle 2]

Every variant makes the same number of image passes (forward and backward of one image at one noise level) in the same
process, in interleaved rounds, so that a busy machine slows all of them. On one thread, CPU time is measured, without
that of other processes. `images/s` is the best round. `ratio` is the time over that of the plain step of the same
precision, the median over rounds. Peak memory is measured in a process per variant, above the memory held before the
first step. The images are random: nothing to download.
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
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor, nn

from sfumato.compute import keep_freed_memory
from sfumato.config import LogNormal
from sfumato.diffusion.noise_levels import draw_noise_levels
from sfumato.diffusion.objective import per_image_loss
from sfumato.diffusion.unet import GroupNorm, UNet
from sfumato.dpsgd.gradients import choose_chunk, clipped_gradient_sum, draw, per_image_gradients

CLIP = 1e-3


@dataclass(frozen=True, kw_only=True)
class Setting:
    passes: int = 256  # image passes of a step
    size: int = 28  # pixels
    channels: int = 1  # of the images
    width: int = 32  # channels of the finest level: kernels are fastest at multiples of 32
    unshuffle: int = 2
    opacus_rows: int = 64  # rows whose gradients Opacus holds at a time

    def network(self) -> UNet:
        torch.manual_seed(0)
        model = UNet(
            self.size, self.channels, 10, width=self.width, multipliers=(2, 2), attention=(1,), unshuffle=self.unshuffle
        )
        with torch.no_grad():
            for parameter in model.parameters():  # away from the zero initialisation, where most gradients vanish
                parameter.add_(0.02 * torch.randn_like(parameter))
        return model

    def data(self, images: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return torch.rand(images, self.channels, self.size, self.size, generator=generator), torch.randint(
            10, (images,), generator=generator
        )


def plain(setting: Setting, autocast: bool) -> Callable[[], object]:
    """The gradient of an ordinary training step."""
    passes, model = setting.passes, setting.network()
    (images, labels), generator = setting.data(passes), torch.Generator().manual_seed(0)
    parameters = list(model.parameters())

    def step() -> object:
        sigma, noise = draw_noise_levels(LogNormal(), passes, generator), torch.randn(images.shape, generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = per_image_loss(model, images, labels, sigma, noise).mean()
        return torch.autograd.grad(loss, parameters)

    return step


def ours(setting: Setting, draws: int, autocast: bool) -> Callable[[], object]:
    """Draws, per-image gradients, clip and sum, as in DP-SGD."""
    model, generator = setting.network(), torch.Generator().manual_seed(0)
    images, labels = setting.data(setting.passes // draws)
    parameters = dict(model.named_parameters())
    chunk = choose_chunk(sum(value.numel() for value in parameters.values()), draws)
    return lambda: clipped_gradient_sum(
        model, parameters, images, labels, draw(model, images, draws, LogNormal(), generator), CLIP, chunk, autocast
    )


class OpacusNorm(nn.Module):
    """Group normalisation in modules that Opacus has rules for."""

    def __init__(self, *arguments: int, affine: bool) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(*arguments, affine=affine)

    def forward(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        return x if scale is None or shift is None else x * scale[:, :, None, None] + shift[:, :, None, None]


def opacus(setting: Setting, draws: int) -> Callable[[], object]:
    """Opacus as it ships: its hooks, on modules it has rules for, and its optimiser's clip and sum, without noise.

    K draws are K rows, whose gradients are averaged before the optimiser sees them.
    """
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    passes, model = setting.passes, setting.network()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, GroupNorm):
                setattr(module, name, OpacusNorm(child.groups, child.channels, affine=child.affine))
    wrapped, rows = GradSampleModule(model), setting.opacus_rows
    images, labels = (tensor.repeat_interleave(draws, 0) for tensor in setting.data(passes // draws))
    generator = torch.Generator().manual_seed(0)
    parameters = list(wrapped.parameters())
    optimizer = DPOptimizer(
        torch.optim.SGD(parameters, lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        expected_batch_size=passes // draws,
    )

    def step() -> None:
        for start in range(0, passes, rows):
            x, y = images[start : start + rows], labels[start : start + rows]
            sigma, noise = draw_noise_levels(LogNormal(), len(x), generator), torch.randn(x.shape, generator=generator)
            per_image_loss(wrapped, x, y, sigma, noise).mean().backward()
            if draws > 1:
                for value in parameters:
                    value.grad_sample = value.grad_sample.unflatten(0, (-1, draws)).mean(1)
            optimizer.signal_skip_step(start + rows < passes)
            optimizer.step()
            optimizer.zero_grad()

    return step


# name -> (plain step to compare with, maker of the step)
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
    """MiB that the steps add to a process which runs this variant alone."""
    command = [sys.executable, __file__, "--alone", name, "--threads", str(threads)]
    command += [part for key, value in asdict(setting).items() for part in (flag(key), str(value))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout.split()[-1])


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def run_alone(name: str, setting: Setting) -> None:
    step = VARIANTS[name][1](setting)
    before = high_water()
    for _ in range(2):
        step()
    print(high_water() - before)


def high_water() -> float:
    """Peak resident memory of this process in MiB (Linux; getrusage would count the parent's)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


def precision(setting: Setting, images: int = 32) -> None:
    """Print how far bfloat16 turns the gradient of each image."""
    model, (x, y) = setting.network(), setting.data(images)
    for draws in (1, 8):
        drawn = draw(model, x, draws, LogNormal(), torch.Generator().manual_seed(0))
        parameters = dict(model.named_parameters())
        exact, rounded = (
            torch.cat(
                [part.flatten(1) for part in per_image_gradients(model, parameters, x, y, drawn, autocast).values()],
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
        "--only", default="", help="text that the names of the measured variants hold, besides the plain steps"
    )
    parser.add_argument("--alone", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    setting = Setting(**{field.name: getattr(options, field.name) for field in fields(Setting)})
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as the stages do: it helps every variant
    if options.alone:
        run_alone(options.alone, setting)
        return
    parameters = sum(value.numel() for value in setting.network().parameters())
    print(f"{parameters:,} parameters, {options.threads} thread(s), {setting}")
    variants = {name: variant for name, variant in VARIANTS.items() if name.startswith("plain") or options.only in name}
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
