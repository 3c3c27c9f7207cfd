"""Check in a few minutes that this code is correct on a GPU, and measure how busy the GPU is.

    python benchmarks/gpu.py --out FOLDER [--device cuda] [--only gradients busy ...]
    python benchmarks/gpu.py --out FOLDER --device cpu --small

The parts are:

- `gradients`: compares each image's gradient with a float64 loop, and checks that the
  gradient does not depend on the image's place in a chunk or on the other images;
- `busy`: checks that memory suffices and that no step waits for the GPU, and measures how busy
  the GPU is (torch.profiler);
- `noise`: measures the cost of the noise in a full step;
- `others`: runs the sampler, the warm-up, the generator, votes and classifiers;
- `killed`: kills a run of twenty steps on digits, and resumes it under the same charge.

All checks run, and a summary is printed at the end. The exit code is 1 if a check failed. On a CPU,
and with --small, speed is not checked. DVC is not needed; a part is skipped, with the reason, if a
package is missing. The results are written to gpu.json and gpu.md in FOLDER. The images are random,
or scikit-learn's digits. `gpu_session.py` compares the speed of steps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gradient_variants import CLIP, Setting, ours
from torch import Tensor

from sfumato.diffusion.objective import per_image_loss
from sfumato.diffusion.unet import UNet
from sfumato.dpsgd.gradients import (
    Draws,
    Microbatch,
    clipped_gradient_sum,
    draw,
    per_draw,
    per_image_gradients,
)
from sfumato.dpsgd.microbatch import choose_microbatch
from sfumato.settings.dpsgd import Finetune
from sfumato.settings.noise_levels import LogNormal

REFERENCE = Setting(passes=8192)
PAPER = Setting(passes=4096, width=36, unshuffle=1, blocks=2)  # profile fashion-mnist-paper
TINY = Setting(passes=32, size=8, width=8, opacus_rows=16)
# Limits of the checks: the GPU must be busy for at least this share of the time, and noise may take
# at most this share of the time of a step
BUSY, NOISE = 0.8, 0.05
STEPS, KILLED_AFTER = 20, 7


@dataclass(kw_only=True)
class Found:
    """Collected measurements and checks. Each is printed at once."""

    device: str
    small: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)

    @property
    def fast(self) -> bool:
        """True if speed is checked."""
        return self.device == "cuda" and not self.small

    def row(self, part: str, what: str, value: float, unit: str, **more: Any) -> None:
        self.rows.append({"part": part, "what": what, "value": value, "unit": unit, **more})
        print(f"{part:10}{what:58}{value:14.5g} {unit}", flush=True)

    def check(self, what: str, passed: bool, detail: str) -> None:
        self.checks.append({"what": what, "passed": bool(passed), "detail": detail})
        print(f"{'ok' if passed else 'FAILED':10}{what}: {detail}", flush=True)

    def skip(self, what: str, reason: object) -> None:
        text = " ".join(str(reason).split())[:300]
        self.skipped.append({"what": what, "reason": text})
        print(f"{'skipped':10}{what}: {text}", flush=True)

    def seconds(self, work: Callable[[], object], rounds: int) -> float:
        """Measure the median seconds of `rounds` calls, after warming up."""
        return statistics.median(self.timed({"work": work}, rounds)["work"])

    def timed(self, works: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
        """Measure the seconds of each call in interleaved rounds, after warming up."""
        times: dict[str, list[float]] = {name: [] for name in works}
        for turn in range(rounds + 1 + self.fast):
            for name, work in works.items():
                self.wait()
                start = time.perf_counter()
                work()
                self.wait()
                if turn > self.fast:
                    times[name].append(time.perf_counter() - start)
        return times

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


# --- gradients ------------------------------------------------------------------------------------


def matrix(
    model: UNet, images: Tensor, labels: Tensor, drawn: Draws, autocast: bool = False
) -> Tensor:
    """Compute the gradient of each image, (B, P)."""
    rows = per_image_gradients(
        model, dict(model.named_parameters()), images, labels, drawn, autocast
    )
    return torch.cat([value.flatten(1) for value in rows.values()], dim=1)


def in_float64(model: UNet, images: Tensor, labels: Tensor, drawn: Draws) -> Tensor:
    """Compute the gradient of each image by ordinary backward passes in float64, (B, P)."""
    exact = model.double()
    rows = []
    for i, copies in enumerate(per_draw(images.double(), drawn)):
        shown = torch.where(drawn.drop[i], model.classes, labels[i])
        loss = per_image_loss(
            Exact(exact),
            copies,
            shown,
            drawn.levels[i].double(),
            drawn.noise[i].double(),
            exact.sigma_data,  # type: ignore[arg-type]
        )
        parts = torch.autograd.grad(loss.mean(), list(exact.parameters()))
        rows.append(torch.cat([part.flatten() for part in parts]))
    model.float()
    return torch.stack(rows)


class Exact:
    """A float64 network that also accepts float32 inputs, because the loss passes them."""

    def __init__(self, model: UNet) -> None:
        self.model = model

    def __call__(self, x: Tensor, c_noise: Tensor, labels: Tensor) -> Tensor:
        out: Tensor = self.model(x.double(), c_noise.double(), labels)
        return out


@contextmanager
def convolutions_in_tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def gradients(found: Found) -> None:
    setting, device, count = TINY if found.small else REFERENCE, found.device, 8
    model, (images, labels) = setting.network(device), setting.data(count, device)
    parameters, generator = dict(model.named_parameters()), torch.Generator(device).manual_seed(0)
    for draws in (1, 8):
        drawn = draw(model, images, draws, LogNormal(), generator, label_dropout=0.2)
        exact = in_float64(model, images, labels, drawn)
        norms = exact.norm(dim=1)
        for tf32 in (False, True) if device == "cuda" else (False,):
            with convolutions_in_tf32(tf32):
                rows = matrix(model, images, labels, drawn).double()
            worst = float(((rows - exact).norm(dim=1) / norms).max())
            name = (
                f"K={draws}, float32{' with TF32 convolutions' if tf32 else ''}: largest relative "
                "error"
            )
            found.row("gradients", name, worst, "relative to float64")
            if not tf32:
                found.check(
                    f"gradients at K={draws} equal the float64 loop",
                    worst < 1e-3,
                    f"error {worst:.2g}",
                )
        rounded = matrix(model, images, labels, drawn, autocast=True).double()
        cosine = torch.nn.functional.cosine_similarity(rounded, exact)
        found.row("gradients", f"K={draws}, bfloat16: worst cosine", float(cosine.min()), "")
        middle = float(cosine.median())
        found.check(
            f"gradients at K={draws} in bfloat16 point in the same direction as in float64",
            middle > 0.999,
            f"median {middle:.5f}",
        )

    # Put one image in every place of a chunk, among other images, and compare its gradients.
    for autocast, rounding in ((False, 1e-4), (True, 1e-5)):  # cuDNN uses TF32 for float32
        first = matrix(model, images, labels, drawn, autocast)
        apart = 0.0
        for place in range(count):
            mixed, own = images.roll(1, 0) * 0.5, labels.roll(1)
            order = torch.arange(count, device=device).roll(1)
            mixed[place], own[place], order[place] = images[0], labels[0], 0
            row = matrix(model, mixed, own, drawn.rows(order), autocast)[place]
            apart = max(apart, float((row - first[0]).norm() / first[0].norm()))
        name = "bfloat16" if autocast else "float32"
        same = "bitwise the same" if apart == 0 else f"largest difference {apart:.2g}"
        found.row(
            "gradients",
            f"{name}: one image in {count} places, largest difference",
            apart,
            "of the gradient's norm",
        )
        found.check(
            f"in {name}, an image's gradient depends neither on its place nor on other images",
            apart < rounding,
            same,
        )

    # Add or remove one image, and compare the released sum.
    whole = clipped_gradient_sum(model, parameters, images, labels, drawn, CLIP, Microbatch(4))
    moved = []
    for i in range(count):
        rest = torch.arange(count, device=device) != i
        without = clipped_gradient_sum(
            model, parameters, images[rest], labels[rest], drawn.rows(rest), CLIP, Microbatch(4)
        )
        moved.append(float((whole.double() - without.double()).norm()) / CLIP)
    found.row("gradients", "largest change of the sum by one image", max(moved), "clips")
    found.check(
        "one image changes the sum by at most the clipping norm",
        max(moved) <= 1 + 1e-4,
        f"{max(moved):.6f} clips",
    )
    parts = clipped_gradient_sum(model, parameters, images, labels, drawn, CLIP, Microbatch(4, 3))
    apart = float((parts - whole).norm()) / CLIP
    found.check(
        "K draws in one pass and in several give the same sum",
        apart < 1e-2,
        f"difference {apart:.2g} clips",
    )


# --- the device -----------------------------------------------------------------------------------


def chunk_of(setting: Setting, draws: int, model: UNet) -> int:
    """Return how many images the program processes at a time on this machine."""
    images = setting.passes // draws
    chunk, _ = choose_microbatch(model, dict(model.named_parameters()), draws, float(images))
    return min(chunk, images)


def busy(found: Found) -> None:
    """Check that memory suffices and no step waits for the GPU. Measure how busy the GPU is."""
    setting = TINY if found.small else PAPER
    for draws in (8, 32):
        model = setting.network(found.device)
        chunk = chunk_of(setting, draws, model)
        products = model.use_products
        found.row("device", f"K={draws}, chunk {chunk}: uses matrix products", products, "")
        step = ours(setting, draws, True, found.device, chunk, draws, products)
        step()
        if found.device != "cuda":
            continue
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with_float32 = ours(setting, draws, False, found.device, chunk, draws, products)
        with_float32()
        peak = torch.cuda.max_memory_allocated() - before
        found.row("device", f"K={draws}, chunk {chunk}: measured memory", peak / 2**30, "GiB")
        free, _ = torch.cuda.mem_get_info()
        found.check(
            f"memory at K={draws} suffices", peak < free, f"{peak:,} of {free:,} free bytes"
        )
        try:
            torch.cuda.set_sync_debug_mode("error")
            step()
            found.check(
                f"no operation of a step at K={draws} waits for the GPU", True, "no synchronisation"
            )
        except RuntimeError as error:
            found.check(
                f"no operation of a step at K={draws} waits for the GPU",
                False,
                str(error).split("\n")[0],
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
        share = busy_share(step)
        found.row("device", f"K={draws}: busy", share, "of the time")
        if found.fast:
            found.check(f"the device is busy at K={draws}", share >= BUSY, f"{share:.1%}")


def busy_share(step: Callable[[], object]) -> float:
    """Return the share of time with a running kernel, from the first to the last kernel."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    events = recorded.profiler.kineto_results.events()
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA
    )
    worked, end = 0, spans[0][0]
    for start, stop in spans:
        worked += max(0, stop - max(start, end))
        end = max(end, stop)
    return worked / (end - spans[0][0])


class OneDraw:
    """A stand-in for a charge: draws all images, and releases sums with noise if `noisy`."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        from sfumato.privacy.noise import NoiseSource

        self.drawn, self.source, self.noisy = (images, labels), NoiseSource(), True

    def agree(self, *given: object) -> None:
        pass

    def batches(self, size: int, draws: int) -> Iterator[tuple[Tensor, ...]]:
        yield from zip(*(value.split(size) for value in self.drawn), strict=True)

    def release(self, total: Tensor, max_norm: float) -> Tensor:
        from sfumato.privacy.noise import public_grid, rounded

        noise = (
            self.source.gaussian(tuple(total.shape), max_norm)
            if self.noisy
            else torch.zeros(total.shape)
        )
        return rounded(noise + total.cpu().double(), public_grid(max_norm)).to(total)


def noise(found: Found) -> None:
    """Measure the share of time that noise takes in a full step (draw, sum, release, Adam)."""
    from sfumato.dpsgd.run import State, step

    setting, images = (TINY, 32) if found.small else (PAPER, 4096)
    state = State(
        setting.network(found.device),
        Finetune(draws=8, max_grad_norm=CLIP),
        public_batch=float(images),
    )
    charge: Any = OneDraw(*setting.data(images))

    def run(noisy: bool) -> Callable[[], object]:
        def once() -> None:
            charge.noisy = noisy
            step(state, charge)

        return once

    times = found.timed({"with": run(True), "without": run(False)}, 2 if found.small else 3)
    with_noise, without = (statistics.median(times[name]) for name in ("with", "without"))
    share = max(0.0, 1 - without / with_noise)
    found.row(
        "step",
        f"{images} images, K=8, {state.size:,} weights, "
        f"{'bfloat16' if state.autocast else 'float32'}",
        with_noise,
        "s",
    )
    found.row("step", "noise", share, "of the step")
    alone = found.seconds(lambda: charge.source.gaussian((state.size,), 1.0), 3)
    found.row("step", "noise, if drawn while the device waits", alone / with_noise, "of the step")
    if found.fast:
        found.check("noise is a small part of a step", share < NOISE, f"{share:.1%}")


# --- everything else ------------------------------------------------------------------------------


def others(found: Found) -> None:
    """Run the sampler, the warm-up, the generator, votes and classifiers."""
    setting = TINY if found.small else REFERENCE
    shape = (setting.channels, setting.size, setting.size)
    for work in (sampler, warm_up, generator, votes, classifiers):
        try:
            work(found, setting, shape)
        except ImportError as error:
            found.skip(work.__name__, error)


def sampler(found: Found, setting: Setting, shape: tuple[int, int, int]) -> None:
    from sfumato.diffusion.sampler import sample

    model, count = setting.network(found.device), 8 if found.small else 1000
    labels, drawn = torch.arange(count) % 10, {}
    for autocast in (False, True):

        def once(autocast: bool = autocast) -> None:
            random = torch.Generator().manual_seed(0)
            parts = [
                sample(model, part, 3 if found.small else 18, 0.5, random, autocast)
                for part in labels.split(500)
            ]
            drawn[autocast] = torch.cat(parts)

        rate = count / found.seconds(once, 1 if found.small else 3)
        found.row("others", f"sampler, {'bfloat16' if autocast else 'float32'}", rate, "images/s")
    apart = float((drawn[True] - drawn[False]).abs().mean())
    found.row("others", "sampler: difference of bfloat16 and float32", apart, "of the range")


def warm_up(found: Found, setting: Setting, shape: tuple[int, int, int]) -> None:
    from sfumato.settings.training import Phase
    from sfumato.training.curriculum import warm_up

    phase = Phase(
        sources={"central": 1.0},
        steps=2 if found.small else 50,
        batch=8 if found.small else 256,
        learning_rate=1e-4,
    )
    sources: Any = {"central": (torch.rand(200, *shape), torch.arange(200) % 10)}
    model = setting.network(found.device)
    took = found.seconds(lambda: warm_up(model, [phase], sources, 0), 1)
    found.row(
        "others", f"warm-up, batches of {phase.batch}", phase.steps * phase.batch / took, "images/s"
    )


def generator(found: Found, setting: Setting, shape: tuple[int, int, int]) -> None:
    from sfumato.features import FeatureMeans
    from sfumato.features.fourier import FourierFeatures
    from sfumato.generators.one_step import Target, fit_generator, new_generator
    from sfumato.settings.queries import FeatureMap
    from sfumato.settings.training import Auxiliary

    size, steps = (20, 2) if found.small else (2000, 50)
    features = FourierFeatures(shape, [FeatureMap(map="pixels", length_scales=(0.3,))], size, 0)
    target = torch.zeros(features.size, 10, device=found.device)
    settings = Auxiliary(steps=steps, batch=20 if found.small else 200)
    fresh = new_generator(shape, 10, settings.latent, 8 if found.small else settings.width, 0)
    priors = torch.full((10,), 0.1)
    means = Target([FeatureMeans(target, features)])
    took = found.seconds(lambda: fit_generator(fresh, means, settings, priors, 0), 1)
    found.row("others", f"generator, batches of {settings.batch}", steps / took, "steps/s")


def votes(found: Found, setting: Setting, shape: tuple[int, int, int]) -> None:
    from sfumato.features.batch_invariant import place_matters, rows_alone
    from sfumato.features.public_network import ResNet

    torch.manual_seed(0)
    network = ResNet(shape, 10, 8 if found.small else 32).to(found.device).eval()
    images = torch.rand(130 if found.small else 2000, *shape).to(found.device)
    matters = place_matters(network, shape, torch.device(found.device))
    rows = rows_alone(network, images, matters)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[
        : len(images) // 2
    ]
    same = torch.equal(rows_alone(network, images[order], matters), rows[order])
    found.check(
        "a vote depends neither on its image's place nor on other images",
        same,
        "one by one" if matters else "in batches",
    )
    for one_by_one in {True, matters}:
        some = images[:64] if one_by_one else images
        rate = len(some) / found.seconds(partial(rows_alone, network, some, one_by_one), 1)
        found.row(
            "others", f"votes, {'one by one' if one_by_one else 'in batches'}", rate, "images/s"
        )


def classifiers(found: Found, setting: Setting, shape: tuple[int, int, int]) -> None:
    from sfumato.evaluation.classifiers import CLASSIFIERS
    from sfumato.evaluation.downstream import fit_classifier, schedule_of

    channels, side, _ = shape
    pixels = np.random.default_rng(0).integers(0, 256, (512, side, side, channels), dtype=np.uint8)
    labels, steps = np.arange(512) % 10, 2 if found.small else 20
    for name in ("lr", "cnn") if found.small else CLASSIFIERS:
        schedule = schedule_of(name, len(pixels), 1, steps=steps)
        took = found.seconds(partial(fit_classifier, name, pixels, labels, 10, schedule, 0), 1)
        found.row("others", f"{name}, batches of {schedule.batch}", steps / took, "steps/s")


# --- killed and resumed ---------------------------------------------------------------------------


def killed(found: Found) -> None:
    """Check that a killed run of twenty steps on digits resumes, and is charged once."""
    with tempfile.TemporaryDirectory() as name:
        if (first := child(found, Path(name), KILLED_AFTER)) is None:
            return
        second = child(found, Path(name), None)
    if second is None:
        return
    started = second["resumed"]
    found.row("killed", "a step of DP-SGD on digits", second["seconds"], "s")
    found.check(
        "a killed run resumes after its last saved step",
        KILLED_AFTER <= started < STEPS,
        f"after step {started}",
    )
    found.check("the resumed run finishes", second["steps"] == STEPS, f"{second['steps']} steps")
    found.check(
        "a killed and resumed run is charged once",
        (first["opened"], second["opened"]) == (1, 1),
        f"charges: {second['opened']}",
    )


def child(found: Found, folder: Path, kill_after: int | None) -> dict[str, int] | None:
    """Run the steps in another process. Returns its output, or None if it failed.

    kill_after: step after which the process is killed, or None.
    """
    command = [sys.executable, __file__, "--out", str(folder), "--device", found.device, "--child"]
    command += ["--small"] * found.small
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        said: dict[str, int] = {}
        for line in process.stdout:
            said |= json.loads(line)
            if kill_after is not None and said.get("step", 0) >= kill_after:
                process.send_signal(signal.SIGKILL)
                break
        process.stdout.close()
        errors = process.stderr.read()
    if process.returncode == 0 or (
        kill_after is not None and process.returncode == -signal.SIGKILL
    ):
        return said
    if "ModuleNotFoundError" in errors:
        found.skip("killed and resumed", errors.splitlines()[-1])
    else:
        found.check("twenty steps on digits finish", False, " ".join(errors.split())[-300:])
    return None


def run_child(folder: Path, device: str, small: bool) -> None:
    """Run twenty steps of DP-SGD on digits under a real charge; print each saved step as JSON."""
    from sfumato.data.prepare import prepare_sensitive
    from sfumato.data.store import read_card
    from sfumato.dpsgd.run import State, epsilon_by_step, fine_tune
    from sfumato.privacy.authorize import ChargeRequest, open_charge
    from sfumato.privacy.events import Mechanism
    from sfumato.privacy.odometer import Odometer
    from sfumato.privacy.policy import SpendingPolicy
    from sfumato.settings.data import Data

    state, card = folder / "state", folder / "card.json"
    if not card.exists():
        prepare_sensitive(Data(source="digits", dataset_id="digits"), state, card, folder)
    mechanism = Mechanism(noise_multiplier=2.0, sample_rate=0.05, uses=STEPS)
    work = ChargeRequest(
        stage="finetune",
        plan="steps",
        settings="steps",
        mechanism=mechanism,
        max_norm=CLIP,
        released="steps",
        sensitivity="the clip",
    )
    permission = SpendingPolicy(delta=1e-5, lifetime_epsilon="unlimited")
    model = replace(TINY, width=8 if small else 32).network(device)
    config = Finetune(steps=STEPS, draws=2, max_grad_norm=CLIP, checkpoint_every=1)
    trained, at, times = State(model, config, public_batch=72.0), [], [time.perf_counter()]

    def report(done: int, total: int) -> None:
        at.append(done)
        times.append(time.perf_counter())
        opened = len(Odometer(state, "digits").opened())
        print(json.dumps({"step": done, "opened": opened}), flush=True)

    charge, log = fine_tune(
        trained,
        lambda: open_charge(state, read_card(card), work, permission),
        epsilon_after=epsilon_by_step(mechanism, 1e-5),
        report=report,
    )
    seconds = statistics.median(np.diff(times[1:]).tolist())
    print(
        json.dumps({"resumed": at[0], "steps": charge.used, "seconds": seconds, "rows": len(log)}),
        flush=True,
    )


# --- all of it ------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Found], None]] = {
    "gradients": gradients,
    "busy": busy,
    "noise": noise,
    "others": others,
    "killed": killed,
}


def markdown(found: Found, about: str) -> str:
    lines = [about, "", "| part | what | value | unit |", "|---|---|---|---|"]
    lines += [
        f"| {row['part']} | {row['what']} | {row['value']:.5g} | {row['unit']} |"
        for row in found.rows
    ]
    lines += ["", "| check | result |", "|---|---|"]
    lines += [
        f"| {check['what']} | {'' if check['passed'] else 'FAILED: '}{check['detail']} |"
        for check in found.checks
    ]
    lines += [f"| {skipped['what']} | skipped: {skipped['reason']} |" for skipped in found.skipped]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.json and gpu.md")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="use small sizes, and do not check speed"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    os.environ["SFUMATO_DEVICE"] = asked.device
    warnings.filterwarnings("ignore")
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU. To run on the CPU, add --device cpu --small")
    if asked.child:
        return run_child(asked.out, asked.device, asked.small)

    asked.out.mkdir(parents=True, exist_ok=True)
    named = (
        torch.cuda.get_device_name()
        if asked.device == "cuda"
        else platform.processor() or platform.machine()
    )
    about = f"{named}, torch {torch.__version__}, Python {platform.python_version()}"
    print(about)
    found, start = Found(device=asked.device, small=asked.small), time.perf_counter()
    for name in asked.only:
        try:
            PARTS[name](found)
        except ImportError as error:
            found.skip(name, error)
        except Exception as error:  # the other parts still run
            found.check(
                f"part {name} finishes",
                False,
                f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            )
        if asked.device == "cuda":
            torch.cuda.empty_cache()
    found.row("all", "took", time.perf_counter() - start, "s")

    content = {"about": about, "rows": found.rows, "checks": found.checks, "skipped": found.skipped}
    (asked.out / "gpu.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    (asked.out / "gpu.md").write_text(markdown(found, about), encoding="utf-8")
    failed = [check["what"] for check in found.checks if not check["passed"]]
    print(f"{len(found.checks)} checks, {len(failed)} failed, {len(found.skipped)} skipped")
    for what in failed:
        print(f"failed: {what}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
