"""Measure in eight minutes on a borrowed GPU how fast this code is, compared with what is possible.

    # on a machine with a network: fetch what a bare machine lacks, into .gpu/
    sh benchmarks/gpu_carry.sh
    python3 benchmarks/gpu_session.py [--out build/gpu] [--seconds 440] [--only step more ...]
        [--resume]
    python benchmarks/gpu_session.py --device cpu --tiny

The parts run in this order, the most valuable first:

- `recipes`: the tests of all stages of eight recipes, on this GPU instead of a simulated one;
- `step`: a full step;
- `more`: the steps of other networks;
- `fitting`: the generator, the features and the votes;
- `drawing`: the sampler;
- `stages`: each stage of `teacher-generator` on Fashion-MNIST; the release is copied to
  OUT/release, to be evaluated elsewhere;
- `graph`: a chunk as a CUDA graph, for K = 1, 8 and 32;
- `compile`: a plain step by `torch.compile`, the strongest baseline;
- `checks`: the parts `gradients` and `killed` of `gpu.py`;
- `steps`: passes per second of DP-SGD, compared with the fastest of several plain steps of the same
  precision, and with Opacus;
- `profile`: the kernels of a step;
- `ceilings`: the limits of the GPU.

Each row is written to OUT/session.jsonl at once. A part is skipped if too few seconds are left for
it, and stopped when time runs out; both cases are reported. With --resume, a later session appends
to the same file and omits the parts that finished. The exit code is 1 if a check or a part failed.
DVC is not needed. On a CPU, speed is not checked.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import bare
import gpu
import torch
from gpu import PAPER, REFERENCE, TINY, Found, chunk_of
from gradient_variants import Setting, gflop, graphed, norms_in_bfloat16, opacus, ours, plain
from torch import nn
from torch.backends import cudnn

ENDING = 3  # Seconds reserved for the program's end
SMALL_STAGES = """
frequency: {size: 200}
auxiliary: {steps: 10, images: 300}
embedding: {size: 100, learned: {steps: 3}}
refine: {steps: 4, images: 300}
teacher: {dimension: 32, steps: 2}
synthesize: {count: 200}
evaluate: {epochs: 1, bound: false, classifiers: [lr], fidelity: [detector]}
"""


class OutOfTime(BaseException):
    """The session's time is up. A BaseException, so that no handler of failed parts catches it."""


@dataclass(kw_only=True)
class Session(Found):
    """Collected results. Each is also written to the disk at once."""

    out: Path
    ends: float  # time at which the session must end, by time.perf_counter

    def left(self) -> float:
        return self.ends - time.perf_counter()

    def write(self, **content: Any) -> None:
        with (self.out / "session.jsonl").open("a", encoding="utf-8") as file:
            print(
                json.dumps({**content, "seconds_left": round(self.left(), 1)}),
                file=file,
                flush=True,
            )
            os.fsync(file.fileno())

    def row(self, part: str, what: str, value: float, unit: str, **more: Any) -> None:
        super().row(part, what, value, unit, **more)
        self.write(**self.rows[-1])

    def check(self, what: str, passed: bool, detail: str) -> None:
        super().check(what, passed, detail)
        self.write(**self.checks[-1])

    def skip(self, what: str, reason: object) -> None:
        super().skip(what, reason)
        self.write(skipped=what, reason=self.skipped[-1]["reason"])


def networks(found: Found) -> dict[str, Setting]:
    """Return the networks by name. The first one is the papers' network for Fashion-MNIST."""
    if found.small:
        return {"tiny": TINY, "tiny, in colour": replace(TINY, channels=3)}
    colour = Setting(passes=4096, size=32, channels=3, width=36, deepest=4, unshuffle=1, blocks=2)
    large = Setting(passes=512, size=128, channels=3, width=64, blocks=2)
    return {
        "fashion-mnist-paper": PAPER,
        "cifar10-paper": colour,
        "reference": REFERENCE,
        "128 pixels": large,
    }


# --- ceilings -------------------------------------------------------------------------------------


def ceilings(found: Session) -> None:
    side, count = (256, 2**20) if found.small else (8192, 2**29)
    a, b = (torch.randn(side, side, device=found.device, dtype=torch.bfloat16) for _ in range(2))
    took = found.seconds(lambda: [a @ b for _ in range(10)], 3)
    found.row(
        "ceilings",
        f"product of two {side}×{side} matrices, bfloat16",
        10 * 2 * side**3 / took / 1e12,
        "TFLOP/s",
    )
    source = torch.randn(count, device=found.device)
    target = torch.empty_like(source)
    took = found.seconds(lambda: [target.copy_(source) for _ in range(10)], 3)
    found.row(
        "ceilings", "copy, bytes read and written", 10 * 2 * source.nbytes / took / 1e12, "TB/s"
    )


def checks(found: Session) -> None:
    gpu.gradients(found)
    gpu.killed(found)


# --- steps ----------------------------------------------------------------------------------------


def measure(
    found: Session,
    what: str,
    make: Callable[[], Callable[[], object]],
    passes: int,
    fastest: float = math.inf,
    changed: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> float:
    """Build a step, and record how many passes per second it makes.

    fastest: seconds per pass of the plain step, for comparison; changed: function that returns a
    context manager, in which the step is built and run. Returns the seconds per pass, or infinity
    if the step fails.
    """
    more = {}
    try:
        if found.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with changed():
            took = found.seconds(make(), 3 if found.fast else 1) / passes
    except Exception as error:  # for example, no memory is left: continue with the other steps
        found.skip(what, f"{type(error).__name__}: {error}")
        return math.inf
    if found.device == "cuda":
        more["gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if math.isfinite(fastest):
        more["plain_steps"] = round(took / fastest, 2)
    found.row("steps", what, 1 / took, "passes/s", **more)
    return took


def steps(found: Session) -> None:
    """Measure plain and private steps of the papers' network for Fashion-MNIST."""
    compare(found, *next(iter(networks(found).items())))


def more(found: Session) -> None:
    """Measure plain and private steps of the other networks."""
    for name, setting in list(networks(found).items())[1:]:
        compare(found, name, setting)


def compare(found: Session, name: str, setting: Setting) -> None:
    device, passes = found.device, setting.passes
    model = setting.network(device)
    weights, operations = sum(value.numel() for value in model.parameters()), gflop(model)
    found.row("steps", f"{name}: operations per pass", operations, "GFLOP", weights=weights)
    kept = {draws: chunk_of(setting, draws, model) for draws in (1, 8, 32)}
    for draws, images in kept.items():
        found.row("steps", f"{name}, K={draws}: chosen images at a time", images, "images")
    del model
    batch = min(passes, 8 * kept[8])
    for autocast in (True, False):
        title = f"{name}, {'bfloat16' if autocast else 'float32'}"
        step = partial(plain, setting, autocast, device, batch)
        last = partial(step, channels_last=True)
        fastest = measure(found, f"{title}, plain", step, passes)
        fastest = min(fastest, measure(found, f"{title}, plain, NHWC", last, passes))
        if autocast:
            what = f"{title}, plain, NHWC, norms in bfloat16"
            fastest = min(fastest, measure(found, what, last, passes, changed=norms_in_bfloat16))
        for draws, images in kept.items():
            for products in (False, True):
                step = partial(ours, setting, draws, autocast, device, images, draws, products)
                what = f"{title}, K={draws}, {'products' if products else 'grouped'}"
                measure(found, what, step, passes, fastest)
                if draws == 8 and autocast:
                    measure(
                        found,
                        f"{what}, norms in bfloat16",
                        step,
                        passes,
                        fastest,
                        norms_in_bfloat16,
                    )
        if not autocast:
            rows = min(passes, 8 * setting.opacus_rows)  # Opacus is measured in float32 only
            step = partial(opacus, replace(setting, passes=rows, opacus_rows=rows), 8, device)
            measure(found, f"{title}, K=8, Opacus", step, rows, fastest)
    tried = f"{name}, bfloat16, K=8, products"
    step = partial(ours, setting, 8, True, device, kept[8], 8, True)
    tuned = partial(cudnn.flags, enabled=True, benchmark=True)
    measure(found, f"{tried}, cudnn.benchmark", step, passes, changed=tuned)
    step = partial(ours, replace(setting, passes=4 * passes), 8, True, device, 4 * kept[8], 8, True)
    measure(found, f"{tried}, {4 * kept[8]} images at a time", step, 4 * passes)


# --- where the time goes --------------------------------------------------------------------------


def profile(found: Session) -> None:
    """Write a step's kernels to profile.txt, and run the part `busy` of `gpu.py`."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    setting = next(iter(networks(found).values()))
    model = setting.network(found.device)
    step = ours(setting, 8, True, found.device, chunk_of(setting, 8, model), 8, model.use_products)
    step()
    found.wait()
    start = time.process_time()
    step()
    found.row(
        "profile", "processor time to launch a step", 1e3 * (time.process_time() - start), "ms"
    )
    found.wait()
    cuda = [ProfilerActivity.CUDA] if found.device == "cuda" else []
    with profiled(activities=[ProfilerActivity.CPU, *cuda]) as recorded:
        step()
        found.wait()
    order = "self_device_time_total" if cuda else "self_cpu_time_total"
    kernels = recorded.key_averages()
    table = kernels.table(sort_by=order, row_limit=30, max_name_column_width=70)
    (found.out / "profile.txt").write_text(table, encoding="utf-8")
    for kernel in sorted(kernels, key=lambda kernel: -getattr(kernel, order))[:10]:
        found.row(
            "profile", kernel.key[:70], getattr(kernel, order) / 1e3, "ms", calls=kernel.count
        )
    gpu.busy(found)


def step(found: Session) -> None:
    gpu.noise(found)


def graph(found: Session) -> None:
    """Measure a chunk as a CUDA graph, and the same chunk without one.

    This part runs late, because a failed capture may break other parts.
    """
    if found.device != "cuda":
        return found.skip("graph", "needs a GPU")
    name, setting = next(iter(networks(found).items()))
    for draws in (1, 8, 32):
        images = max(1, min(2048, setting.passes) // draws)
        what = f"{name}, bfloat16, K={draws}, {images} images at a time"
        measure(
            found, what, partial(ours, setting, draws, True, "cuda", images, draws), setting.passes
        )
        measure(
            found, f"{what}, a CUDA graph", partial(graphed, setting, draws, images), setting.passes
        )


def compiled(found: Session) -> None:
    """Measure the plain step by `torch.compile`, the strongest baseline.

    This part runs late, because the search for the fastest kernels takes minutes.
    """
    if found.device != "cuda":
        return found.skip("compile", "needs a GPU")
    name, setting = next(iter(networks(found).items()))
    batch = min(setting.passes, 2048)
    for autocast in (True, False):
        what = f"{name}, {'bfloat16' if autocast else 'float32'}, plain, NHWC"
        step = partial(plain, setting, autocast, "cuda", batch, channels_last=True)
        fastest = measure(found, f"{what}, not compiled", step, setting.passes)
        measure(found, f"{what}, compiled", partial(step, compiled=True), setting.passes, fastest)


# --- the pipeline ---------------------------------------------------------------------------------


def recipes(found: Session) -> None:
    """Run the tests of all stages of eight recipes on this GPU instead of a simulated one."""
    if found.device != "cuda":
        return found.skip("recipes", "needs a GPU")
    tests = "tests/stages/test_stages_on_a_gpu.py"
    words = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", tests]
    start = time.perf_counter()
    done = subprocess.run(
        words,
        cwd=bare.ROOT,
        env={**os.environ, "SFUMATO_REAL_GPU": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    last = " ".join(done.stdout.split())[-600:]
    if "No module named pytest" in done.stderr:
        return found.skip("recipes", "pytest is missing")
    found.check("every stage of eight recipes runs on the GPU", done.returncode == 0, last)
    found.row("recipes", "tests of eight recipes", time.perf_counter() - start, "s")


def stages(found: Session) -> None:
    """Run each stage of a recipe in its own process, as a user does, and report the release's ε."""
    from sfumato.settings.recipes import load_params

    pictures = bare.CARRIED / "fashion-mnist"
    fashion = pictures.is_dir() and not found.small
    data = f"{{dataset_id: fashion, source: fashion-mnist, path: {pictures}}}" if fashion else "{}"
    lines = [
        "recipe: teacher-generator",
        f"profile: {'fashion-mnist-cpu' if fashion else 'digits'}",
        "seed: 0",
    ]
    lines += [f"data: {data}", "privacy: {epsilon: 10}", SMALL_STAGES if found.small else ""]
    with tempfile.TemporaryDirectory() as below:
        folder = Path(below)
        params = folder / "params.yaml"
        params.write_text("\n".join(lines), encoding="utf-8")
        recipe = load_params(params, bare.ROOT / "pipelines").run
        commands = ["prepare sensitive", "prepare public", "plan", *recipe]
        if all(ran(found, folder, name) for name in commands):
            card = json.loads(
                (folder / "artifacts" / "synthesize" / "card.json").read_text(encoding="utf-8")
            )
            found.row("stages", "epsilon of the release", card["epsilon"], "", delta=card["delta"])
        if (folder / "artifacts" / "synthesize").is_dir():
            shutil.copytree(
                folder / "artifacts" / "synthesize", found.out / "release", dirs_exist_ok=True
            )


def ran(found: Session, folder: Path, command: str) -> bool:
    """Run `stage COMMAND`, and record its seconds as a row. Returns whether it succeeded."""
    environment = {**os.environ, "SFUMATO_STATE": str(folder / ".state")}
    words = [sys.executable, "-m", "stages.cli", *command.split()]
    start = time.perf_counter()
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if "No module named" in done.stderr:
        found.skip(f"stage {command}", done.stderr.splitlines()[-1])
    elif done.returncode:
        found.check(f"stage {command} succeeds", False, " ".join(done.stderr.split())[-300:])
    else:
        found.row("stages", f"stage {command}", time.perf_counter() - start, "s")
    return done.returncode == 0


def drawing(found: Session) -> None:
    setting = next(iter(networks(found).values()))
    gpu.sampler(found, setting, (setting.channels, setting.size, setting.size))


def fitting(found: Session) -> None:
    """Measure the speed of the generator, the features and the votes."""
    from sfumato.features import FeatureMeans
    from sfumato.features.batch_invariant import place_matters, rows_alone
    from sfumato.features.fourier import FourierFeatures
    from sfumato.generators.one_step import Target, fit_generator, new_generator
    from sfumato.settings.queries import FeatureMap
    from sfumato.settings.training import Auxiliary

    maps = [
        FeatureMap(map="deep-scattering", length_scales=(0.837, 0.418), weight=0.5),
        FeatureMap(map="pixels", length_scales=(0.366, 0.183), weight=0.5),
    ]
    size, count = (100, 70) if found.small else (11_000, 4096)
    config = Auxiliary(steps=2, batch=20) if found.small else Auxiliary(steps=60)
    priors = torch.full((10,), 0.1, dtype=torch.float64)
    for side in (8,) if found.small else (28, 128):
        shape = 1, side, side
        features, generator = (
            FourierFeatures(shape, maps, size, 0),
            new_generator(shape, 10, config.latent, config.width, 0),
        )
        match = FeatureMeans(torch.zeros(features.size, 10, device=found.device), features)
        took = found.seconds(
            partial(fit_generator, generator, Target([match]), config, priors, 0), 1
        )
        found.row(
            "fitting",
            f"generator, {side} pixels, batches of {config.batch}",
            config.steps / took,
            "steps/s",
        )
        latent = torch.randn(1000, config.latent, device=found.device)
        drawn = partial(
            generator.to(found.device).eval(),
            latent,
            torch.zeros_like(latent[:, 0], dtype=torch.int64),
        )
        with torch.no_grad():
            found.row(
                "drawing", f"generator, {side} pixels", 1000 / found.seconds(drawn, 1), "images/s"
            )
        network: nn.Module = features.to(found.device)
        images = torch.rand(count, *shape).to(found.device)
        matters = place_matters(network, shape, torch.device(found.device))
        for alone in {False, matters}:
            some = images[:64] if alone else images
            took = found.seconds(partial(rows_alone, network, some, alone), 1)
            what = f"features, {side} pixels, {'one' if alone else '64'} at a time"
            found.row("fitting", what, len(some) / took, "images/s", needed=alone == matters)
    gpu.votes(found, TINY if found.small else REFERENCE, (1, side, side))


# --- all of it ------------------------------------------------------------------------------------

# Name -> (part, seconds that must be left to start it), in the order of running.
PARTS: dict[str, tuple[Callable[[Session], None], int]] = {
    "recipes": (recipes, 60),
    "step": (step, 15),
    "more": (more, 30),
    "fitting": (fitting, 15),
    "drawing": (drawing, 10),
    "stages": (stages, 40),
    "graph": (graph, 10),
    "compile": (compiled, 60),
    "checks": (checks, 20),
    "steps": (steps, 30),
    "profile": (profile, 15),
    "ceilings": (ceilings, 10),
}


def run(found: Session, names: list[str]) -> None:
    """Run the parts one after another. A part that fails does not stop the others."""

    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    for name in names:
        part, needed = PARTS[name]
        if found.left() < needed:
            found.skip(name, f"{found.left():.0f} s are left, but this part needs {needed} s")
            continue
        signal.setitimer(signal.ITIMER_REAL, max(0.1, found.left()))
        try:
            part(found)
            found.write(ended=name)
        except OutOfTime:
            found.skip(name, "stopped at the time limit; the rows that it had written are kept")
        except ImportError as error:
            found.skip(name, error)
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            found.check(f"part {name} finishes", False, f"{type(error).__name__}: {reason}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if found.device == "cuda":
            torch.cuda.empty_cache()
    signal.signal(signal.SIGALRM, before)


def ended_parts(file: Path) -> set[str]:
    """Return the names of the parts that finished. Incomplete lines of the file are ignored."""
    ended = set()
    for line in file.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            ended.add(json.loads(line).get("ended"))
    return ended - {None}


def main(began: float | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/gpu"),
        help="folder for session.jsonl and profile.txt",
    )
    parser.add_argument(
        "--seconds", type=float, default=440, help="time limit of the program, in seconds"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="use small sizes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--resume", action="store_true", help="omit parts that have finished")
    asked = parser.parse_args()
    os.environ["SFUMATO_DEVICE"] = asked.device
    warnings.filterwarnings("ignore")
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU. To run on the CPU, add --device cpu --tiny")

    asked.out.mkdir(parents=True, exist_ok=True)
    ended = set()
    if asked.resume and (asked.out / "session.jsonl").is_file():
        ended = ended_parts(asked.out / "session.jsonl")
    else:
        (asked.out / "session.jsonl").unlink(missing_ok=True)
    ends = (time.perf_counter() if began is None else began) + asked.seconds - ENDING
    found = Session(device=asked.device, small=asked.tiny, out=asked.out, ends=ends)
    named = (
        torch.cuda.get_device_name()
        if asked.device == "cuda"
        else platform.processor() or platform.machine()
    )
    found.write(device=named, torch=torch.__version__, python=platform.python_version())
    run(found, [name for name in asked.only if name not in ended])
    failed = [check["what"] for check in found.checks if not check["passed"]]
    print(
        f"{len(found.rows)} rows, {len(found.checks)} checks, {len(failed)} failed, "
        f"{len(found.skipped)} skipped"
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(bare.BEGAN)
