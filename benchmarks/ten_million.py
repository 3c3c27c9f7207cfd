"""Measure memory and time of the stages that read sensitive images, by the number of images.

    nice -n 5 python benchmarks/ten_million.py [--images 100000 1000000 10000000] [--features 64]
    nice -n 5 python benchmarks/ten_million.py --images 10000 100000 --side 128
        --parts prepare frequency synthesize

Random grey images of ten classes are written as a NumPy archive (640 MB for ten million images of
8×8). The memory must not depend on the number of images.

Each part runs on the images in its own process, on one thread: `prepare`, `count`, `central`,
`frequency`, one step of DP-SGD and, only if --parts names it, `synthesize`. The part `synthesize`
draws the same number of images from a generator, distorts and blends some, and writes the release.
Memory is the largest resident anonymous memory of the process (RssAnon in /proc/PID/status, read
every 10 ms). It excludes pages of files, which the system caches only while no other program needs
the memory. Seconds are processor time of the part, without imports. The program needs Linux, and
three times the images' space in --folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

PARTS = ("prepare", "count", "central", "frequency", "dp-sgd step", "synthesize")
CLASSES, BATCH = 10, 256
WRITTEN = 2**22  # Number of bytes to write at a time
BOUND = 1.1  # Largest allowed ratio of the memory for different numbers of images
POLL = 0.01  # Seconds between two readings of the memory


def write_set(path: Path, images: int, side: int) -> None:
    """Write an archive of random images and labels, piece by piece."""
    random, rows = np.random.default_rng(0), WRITTEN // side**2
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("images.npy", "w", force_zip64=True) as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (images, side, side)}
            np.lib.format.write_array_header_1_0(file, header)
            for start in range(0, images, rows):
                file.write(random.bytes(min(rows, images - start) * side**2))
        with archive.open("labels.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(file, {**header, "shape": (images,)})
            for start in range(0, images, rows):
                file.write(
                    (np.arange(start, min(start + rows, images)) % CLASSES)
                    .astype(np.uint8)
                    .tobytes()
                )
        with archive.open("classes.npy", "w") as file:
            np.lib.format.write_array(file, np.array([f"class {i}" for i in range(CLASSES)]))


def work(part: str, folder: Path, images: int, features: int, side: int) -> Callable[[], object]:
    """Import and build what a part needs, and return a function that runs it."""
    import torch

    from sfumato.data.prepare import prepare_sensitive
    from sfumato.data.store import read_card
    from sfumato.diffusion.unet import UNet
    from sfumato.dpsgd.run import State, step
    from sfumato.features.fourier import FourierFeatures
    from sfumato.generators.one_step import new_generator, save_generator
    from sfumato.privacy.authorize import ChargeRequest, open_charge
    from sfumato.privacy.events import Mechanism
    from sfumato.privacy.policy import SpendingPolicy
    from sfumato.queries.central import central_norm, query_central
    from sfumato.queries.count import query_count
    from sfumato.queries.feature_means import query_feature_means
    from sfumato.release.release import save_release
    from sfumato.release.synthesis import draw_mixture
    from sfumato.release.variation import vary, vary_parts
    from sfumato.settings.data import Data
    from sfumato.settings.dpsgd import Finetune
    from sfumato.settings.queries import Central, FeatureMap
    from sfumato.settings.release import Synthesize
    from sfumato.settings.training import Architecture
    from sfumato.storage.records import Records

    state, card, shape = folder / "state", folder / "card.json", (1, side, side)
    if part == "prepare":
        data = Data(
            source="npz", path=str(folder / "set.npz"), dataset_id="many", holdout_fraction=0.01
        )
        return lambda: prepare_sensitive(data, state, card, folder)

    def charge(mechanism: Mechanism, max_norm: float):
        asked = ChargeRequest(
            stage=part,
            plan=part,
            settings=part,
            mechanism=mechanism,
            max_norm=max_norm,
            released="",
            sensitivity="",
        )
        return open_charge(
            state, read_card(card), asked, SpendingPolicy(delta=1e-8, lifetime_epsilon="unlimited")
        )

    if part == "count":
        return lambda: query_count(charge(Mechanism(noise_multiplier=5.0), 1.0), CLASSES)
    if part == "central":
        settings = Central(statistic="mean", repeats=1)
        bound, denominators = (
            central_norm(shape, settings),
            torch.full((CLASSES,), images / CLASSES),
        )
        mechanism = Mechanism(noise_multiplier=5.0)
        return lambda: query_central(charge(mechanism, bound), denominators, shape, settings)
    if part == "frequency":
        seen = FeatureMap(map="pixels" if side < 16 else "deep-scattering", length_scales=(0.3,))
        known = FourierFeatures(shape, [seen], features, 0)
        return lambda: query_feature_means(
            charge(Mechanism(noise_multiplier=5.0), 1.0), known, CLASSES, float(images)
        )
    if part == "synthesize":
        many = Synthesize(count=images, sources={"auxiliary": 1.0})
        classes = [f"class {i}" for i in range(CLASSES)]
        about = {
            "dataset_id": "many",
            "shape": shape,
            "classes": classes,
            "size_hint": images,
            "delta": 1e-8,
        }
        plan: Any = SimpleNamespace(settings=many, about={}, several=False, prepared={}, **about)
        save_generator(new_generator(shape, CLASSES, 32, 40, 0), folder / "auxiliary")

        def release() -> None:
            drawn, labels, sources = draw_mixture(
                {"auxiliary": folder / "auxiliary"}, many, None, 0, folder=folder
            )
            (folder / "release").mkdir()
            random, unsure = (
                torch.Generator().manual_seed(0),
                torch.full((images, CLASSES), 1 / CLASSES),
            )
            vary_parts(drawn, images // 4, images // 2, unsure, random)
            varied = vary(drawn, labels, many, None, 0)
            save_release(folder / "release", varied, sources, Records(), plan)

        return release
    torch.manual_seed(0)
    network = UNet(side, 1, CLASSES, Architecture(width=16, multipliers=(1, 1), attention=(1,)))
    dpsgd = Finetune(steps=1, batch=BATCH, draws=1, max_grad_norm=1.0)
    trained = State(network, dpsgd, public_batch=float(BATCH), autocast=False)
    rate = Mechanism(noise_multiplier=1.0, sample_rate=BATCH / images, uses=1)
    return lambda: step(trained, charge(rate, 1.0))


def measured(part: str, folder: Path, images: int, features: int, side: int) -> tuple[float, float]:
    """Run one part in its own process. Returns its peak anonymous memory in MB, and CPU seconds."""
    command = [
        sys.executable,
        __file__,
        "--part",
        part,
        "--folder",
        str(folder),
        "--features",
        str(features),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += ["--images", str(images), "--side", str(side)]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    peak, status = 0, Path(f"/proc/{child.pid}/status")
    while child.poll() is None:
        lines = status.read_text().splitlines()
        peak = max([peak, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))])
        time.sleep(POLL)
    assert child.stdout is not None
    said = child.stdout.read()
    if child.returncode:
        raise SystemExit(f"part {part} failed on {images:,} images: see the error above")
    return peak / 1024, float(json.loads(said.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--side", type=int, default=8)
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS[:-1])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part:
        run = work(asked.part, asked.folder, asked.images[0], asked.features, asked.side)
        before = time.process_time()
        run()
        print(json.dumps(time.process_time() - before))
        return
    found: dict[str, list[tuple[float, float]]] = {part: [] for part in asked.parts}
    for images in asked.images:
        with tempfile.TemporaryDirectory(dir=asked.folder) as name:
            write_set(Path(name) / "set.npz", images, asked.side)
            for part in asked.parts:
                found[part].append(measured(part, Path(name), images, asked.features, asked.side))
                memory, seconds = found[part][-1]
                print(
                    f"{part}, {images:,} images: {memory:.0f} MB, {seconds:.2f} s", file=sys.stderr
                )
    print(
        "| | "
        + " | ".join(f"{images:,} images" for images in asked.images)
        + " | largest / smallest memory |"
    )
    print("|---" * (len(asked.images) + 2) + "|")
    ratios = {
        part: max(memory for memory, _ in row) / min(memory for memory, _ in row)
        for part, row in found.items()
    }
    for part, row in found.items():
        cells = " | ".join(f"{memory:.0f} MB, {seconds:.1f} s" for memory, seconds in row)
        print(f"| {part} | {cells} | {ratios[part]:.2f} |")
    if worst := [part for part, ratio in ratios.items() if ratio > BOUND]:
        raise SystemExit(
            f"the memory of these parts depends on the number of images: {', '.join(worst)}"
        )


if __name__ == "__main__":
    main()
