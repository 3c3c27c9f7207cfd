"""Measure the peak memory of `stage select` on a public set as large as ImageNet-32.

    python benchmarks/selection_memory.py [--images 1281167] [--classes 1000] [--side 32]
        [--scratch DIR]

The set is a sparse file of blank images (3.9 GB long, but almost nothing on the disk) with random
labels. The histogram that the stage reads is random too. The stage runs in its own process, as in a
pipeline: it verifies all bytes, but loads only the images that it draws into selection.png. The
files are deleted afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml

from sfumato.storage.artifacts import writing

SELECT = """
import numpy, torch, sfumato.data.images, sfumato.storage.artifacts, matplotlib.figure
def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(field))
before = memory("VmHWM")
from sfumato.settings.stages import STAGES
from stages.runner import run_stage
run_stage(STAGES["select"])
print(before, memory("VmHWM"), memory("RssAnon"))
"""


def prepare(folder: Path, images: int, classes: int, side: int) -> None:
    """Write a public set, a histogram for ten sensitive classes, and the plan of `select`."""
    names = [f"class-{i:04d}" for i in range(classes)]
    random = np.random.default_rng(0)
    with writing(folder / "data/public", "public") as directory:
        np.lib.format.open_memmap(
            directory / "images.npy", mode="w+", dtype=np.uint8, shape=(images, side, side, 3)
        ).flush()
        np.save(directory / "labels.npy", random.integers(0, classes, images))
        card = {
            "enabled": True,
            "source": "benchmark",
            "shape": [3, side, side],
            "classes": names,
            "images": images,
        }
        (directory / "card.json").write_text(json.dumps(card))
    with writing(folder / "artifacts/histogram", "histogram") as directory:
        np.save(directory / "histogram.npy", random.normal(50, 50, (10, classes)))
        (directory / "histogram.json").write_text(
            json.dumps({"public_classes": names, "votes": 1, "per_class": True})
        )
    plan = {
        "stage": "select",
        "enabled": True,
        "settings": {"ratio": 0.2},
        "shape": [3, side, side],
        "classes": list("0123456789"),
    }
    (folder / "artifacts/plan").mkdir()
    (folder / "artifacts/plan/select.yaml").write_text(
        yaml.safe_dump(plan | {"dataset_id": "benchmark", "size_hint": 50_000})
    )


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--images", type=int, default=1_281_167)
    arguments.add_argument("--classes", type=int, default=1000)
    arguments.add_argument("--side", type=int, default=32)
    arguments.add_argument(
        "--scratch",
        type=Path,
        default=None,
        help="Directory to write the set to. Default: the system's temporary directory.",
    )
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.scratch) as folder:
        prepare(Path(folder), chosen.images, chosen.classes, chosen.side)
        start = time.perf_counter()
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        done = subprocess.run(
            [sys.executable, "-c", SELECT],
            cwd=folder,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        seconds = time.perf_counter() - start
        kept = json.loads((Path(folder) / "select" / "selection.json").read_text())
    before, peak, own = map(float, done.stdout.split())
    print(
        f"{chosen.images} images of {chosen.side}×{chosen.side}×3; {kept['images']} images of "
        f"{len(kept['kept'])} classes are kept"
    )
    print(
        f"peak resident memory: {before:.0f} MiB after the imports, {peak:.0f} MiB at the end; "
        f"{seconds:.0f} s in total"
    )
    print(
        f"{own:.0f} MiB at the end are the process's own; the rest are pages of mapped files, "
        "which the system can reclaim"
    )


if __name__ == "__main__":
    main()
