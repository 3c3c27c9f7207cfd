"""Memory and seconds of what reads sensitive images, by how many there are: it must not depend on their number.

    nice -n 5 python benchmarks/ten_million.py [--images 100000 1000000 10000000] [--features 64]

Random grey images of 8×8 with ten classes are written as an archive of NumPy (640 MB for ten million). Then `prepare`,
`count`, `central`, `frequency` and one step of DP-SGD run on them, each in a process of its own, on one thread. Memory
is the largest resident anonymous memory of the process (RssAnon in /proc/PID/status, read every 10 ms): what it holds
itself, without the pages of files that the system keeps for it as long as nothing else needs them. Seconds are of the
processor and of the work alone, without imports. Needs Linux and three times the room of the images in --folder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

PARTS = ("prepare", "count", "central", "frequency", "dp-sgd step")
SHAPE, CLASSES, BATCH = (8, 8), 10, 256
ROWS = 2**16  # written at a time
BOUND = 1.1  # the memory of the largest set over that of the smallest
POLL = 0.01  # seconds


def write_set(path: Path, images: int) -> None:
    """An archive of random images and labels, written piece by piece."""
    random = np.random.default_rng(0)
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("images.npy", "w", force_zip64=True) as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (images, *SHAPE)}
            np.lib.format.write_array_header_1_0(file, header)
            for start in range(0, images, ROWS):
                file.write(random.bytes(min(ROWS, images - start) * math.prod(SHAPE)))
        with archive.open("labels.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(file, {**header, "shape": (images,)})
            for start in range(0, images, ROWS):
                file.write((np.arange(start, min(start + ROWS, images)) % CLASSES).astype(np.uint8).tobytes())
        with archive.open("classes.npy", "w") as file:
            np.lib.format.write_array(file, np.array([f"class {i}" for i in range(CLASSES)]))


def work(part: str, folder: Path, images: int, features: int) -> Callable[[], object]:
    """What one process does, ready to run: all is imported and built."""
    import torch

    from sfumato.data.prepare import prepare_sensitive
    from sfumato.data.store import read_card
    from sfumato.diffusion.unet import UNet
    from sfumato.dpsgd.run import State, step
    from sfumato.features.fourier import FourierFeatures
    from sfumato.privacy.authorize import ChargeRequest, SpendingPolicy, open_charge
    from sfumato.privacy.events import Mechanism
    from sfumato.queries.central import central_norm, query_central
    from sfumato.queries.count import query_count
    from sfumato.queries.feature_means import query_feature_means
    from sfumato.settings.data import Data
    from sfumato.settings.dpsgd import Finetune
    from sfumato.settings.queries import Central, FeatureMap

    state, card = folder / "state", folder / "card.json"
    if part == "prepare":
        data = Data(source="npz", path=str(folder / "set.npz"), dataset_id="many", holdout_fraction=0.01)
        return lambda: prepare_sensitive(data, state, card, folder)

    def charge(mechanism: Mechanism, max_norm: float):
        asked = ChargeRequest(
            stage=part, plan=part, settings=part, mechanism=mechanism, max_norm=max_norm, released="", sensitivity=""
        )
        return open_charge(state, read_card(card), asked, SpendingPolicy(delta=1e-8, lifetime_epsilon="unlimited"))

    if part == "count":
        return lambda: query_count(charge(Mechanism(noise_multiplier=5.0), 1.0), CLASSES)
    if part == "central":
        settings = Central(statistic="mean", repeats=1)
        bound, denominators = central_norm((1, *SHAPE), settings), torch.full((CLASSES,), images / CLASSES)
        mechanism = Mechanism(noise_multiplier=5.0)
        return lambda: query_central(charge(mechanism, bound), denominators, (1, *SHAPE), settings)
    if part == "frequency":
        known = FourierFeatures((1, *SHAPE), [FeatureMap(map="pixels", length_scales=(0.3,))], features, 0)
        return lambda: query_feature_means(charge(Mechanism(noise_multiplier=5.0), 1.0), known, CLASSES, float(images))
    torch.manual_seed(0)
    network = UNet(SHAPE[0], 1, CLASSES, width=16, multipliers=(1, 1), attention=(1,))
    dpsgd = Finetune(steps=1, batch=BATCH, draws=1, max_grad_norm=1.0)
    trained = State(network, dpsgd, public_batch=float(BATCH), autocast=False)
    rate = Mechanism(noise_multiplier=1.0, sample_rate=BATCH / images, uses=1)
    return lambda: step(trained, charge(rate, 1.0))


def measured(part: str, folder: Path, images: int, features: int) -> tuple[float, float]:
    """The largest resident anonymous memory of a process that does one part, in MB, and its processor's seconds."""
    command = [sys.executable, __file__, "--part", part, "--folder", str(folder), "--features", str(features)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([*command, "--images", str(images)], env=environment, stdout=subprocess.PIPE)
    peak, status = 0, Path(f"/proc/{child.pid}/status")
    while child.poll() is None:
        lines = status.read_text().splitlines()
        peak = max([peak, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))])
        time.sleep(POLL)
    assert child.stdout is not None
    said = child.stdout.read()
    if child.returncode:
        raise SystemExit(f"{part} with {images:,} images failed")
    return peak / 1024, float(json.loads(said.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part:
        run = work(asked.part, asked.folder, asked.images[0], asked.features)
        before = time.process_time()
        run()
        print(json.dumps(time.process_time() - before))
        return
    found: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS}
    for images in asked.images:
        with tempfile.TemporaryDirectory(dir=asked.folder) as name:
            write_set(Path(name) / "set.npz", images)
            for part in PARTS:
                found[part].append(measured(part, Path(name), images, asked.features))
                memory, seconds = found[part][-1]
                print(f"{images:,} {part}: {memory:.0f} MB, {seconds:.2f} s", file=sys.stderr)
    print("| | " + " | ".join(f"{images:,} images" for images in asked.images) + " | largest / smallest |")
    print("|---" * (len(asked.images) + 2) + "|")
    ratios = {part: max(memory for memory, _ in row) / min(memory for memory, _ in row) for part, row in found.items()}
    for part, row in found.items():
        cells = " | ".join(f"{memory:.0f} MB, {seconds:.1f} s" for memory, seconds in row)
        print(f"| {part} | {cells} | {ratios[part]:.2f} |")
    if worst := [part for part, ratio in ratios.items() if ratio > BOUND]:
        raise SystemExit(f"memory grows with the number of images: {', '.join(worst)}")


if __name__ == "__main__":
    main()
