"""Measure how fast pictures are decoded, and how much memory comparing two datasets takes.

    OMP_NUM_THREADS=1 python benchmarks/decoding.py FOLDER [--threads 2] [--size 64] [--rounds 5]
    OMP_NUM_THREADS=1 python benchmarks/decoding.py --images 10000 100000 1000000

FOLDER: pictures, also in subfolders. Every round decodes all of them in one thread and then in
several threads. The two times are compared within each round, because other programs slow both
alike. Processor seconds are the sum over all threads. With --images, a separate process compares
two sets of that many random images (8×8, grey), first by bytes and then by similarity. The printed
memory is the peak of the resident anonymous memory during the comparison, minus its value before.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

COMPARE = """
import sys, threading, time
from pathlib import Path
import numpy as np, PIL.Image
from sfumato.data import duplicates
def memory():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))
fresh, other = map(Path, sys.argv[1:])
before, most, done = memory(), 0, False
def watch():
    global most
    while not done:
        most = max(most, memory())
        time.sleep(0.01)
watcher = threading.Thread(target=watch)
watcher.start()
began = time.process_time()
same = len(np.intersect1d(*map(duplicates.content_hashes, (fresh, other))))
alike = duplicates.resized_copies(fresh, other)
seconds = time.process_time() - began
done = True
watcher.join()
print(f"| {most - before:.0f} | {seconds:.0f} |")
"""


def speed(folder: Path, threads: int, size: int, rounds: int) -> None:
    from sfumato.data import decoding
    from sfumato.data.sources.source import Request

    files = sorted(file for file in folder.rglob("*") if file.is_file())
    found: dict[int, list[float]] = {1: [], threads: []}
    print("| threads | s | pictures per second | processor s |\n|---|---|---|---|")
    for _ in range(rounds):
        for decoding.DECODERS in found:
            request = Request(section="data", name="", path=None, size=(size, size), channels=1)
            began, before = time.perf_counter(), time.process_time()
            count = sum(isinstance(image, np.ndarray) for image in decoding.decoded(files, request))
            seconds = time.perf_counter() - began
            found[decoding.DECODERS].append(seconds)
            spent = time.process_time() - before
            print(
                f"| {decoding.DECODERS} | {seconds:.2f} | {count / seconds:.0f} | {spent:.2f} |",
                flush=True,
            )
    ratios = [one / many for one, many in zip(*found.values(), strict=True)]
    print(
        f"time with 1 thread / time with {threads} threads, by round: "
        f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}; median {median(ratios):.2f}"
    )


def memory(images: list[int]) -> None:
    print("| images in each set | MB | processor s |\n|---|---|---|")
    for count in images:
        with tempfile.TemporaryDirectory() as folder:
            homes = [Path(folder, name) for name in ("fresh", "other")]
            for seed, home in enumerate(homes):
                for part, rows in (("sensitive", count - count // 5), ("holdout", count // 5)):
                    (home / part).mkdir(parents=True)
                    drawn = np.random.default_rng([seed, rows]).integers(
                        0, 256, (rows, 8, 8, 1), dtype=np.uint8
                    )
                    np.save(home / part / "images.npy", drawn)
            print(f"| {count} ", end="", flush=True)
            subprocess.run([sys.executable, "-c", COMPARE, *map(str, homes)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, nargs="+", default=[])
    arguments = parser.parse_args()
    if arguments.folder:
        speed(arguments.folder, arguments.threads, arguments.size, arguments.rounds)
    memory(arguments.images)


if __name__ == "__main__":
    main()
