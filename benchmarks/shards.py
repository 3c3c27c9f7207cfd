"""Measure time and memory of preparing tar shards, and check that kills change no bytes.

    OMP_NUM_THREADS=1 python benchmarks/shards.py --folder FOLDER [--pictures 200000] [--shards 20]
        [--rounds 3] [--kills 5] [--s3]

The shards (32×32, in colour) and the state directories are written to FOLDER. FOLDER is removed at
the end, with everything in it. Each round prepares with one worker and then with two, so that other
programs slow both alike. In the end, the shortest times of both are compared. Memory is the largest
resident anonymous memory of a process. Each kill ends the whole process group by SIGKILL at a
random time, and the same command then resumes the preparation. With --s3, the shards are also read
through s3://, from a moto server that this program starts.
"""

import argparse
import hashlib
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import yaml
from PIL import Image

BUCKET = "scans"
PORT = 5591


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pictures", type=int, default=200_000)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--s3", action="store_true")
    options = parser.parse_args()
    tars = options.folder / "tars"
    tars.mkdir(parents=True, exist_ok=True)
    try:
        write_shards(tars, options.pictures, options.shards)
        measure(options, tars)
    finally:
        shutil.rmtree(options.folder)


def measure(options: argparse.Namespace, tars: Path) -> None:
    best = {1: float("inf"), 2: float("inf")}
    digests = set()
    key = os.urandom(32)
    print("| workers | s | MiB |\n|---|---|---|")
    for _ in range(options.rounds):
        for workers in best:
            seconds, memory, digest = prepare(options.folder, str(tars), workers, key)
            digests.add(digest)
            best[workers] = min(best[workers], seconds)
            print(f"| {workers} | {seconds:.1f} | {memory:.0f} |", flush=True)
    print(f"two workers take {best[2] / best[1]:.2f} of the time of one")
    for number in range(options.kills):
        after = random.uniform(0.1, 0.9) * best[2]
        seconds, _, digest = prepare(options.folder, str(tars), 2, key, after)
        digests.add(digest)
        print(
            f"killed after {after:.1f} s (kill {number + 1}): the resumed run took {seconds:.1f} s",
            flush=True,
        )
    if options.s3:
        with server(tars):
            url = f"s3://{BUCKET}/{{0000..{options.shards - 1:04d}}}.tar"
            seconds, memory, digest = prepare(options.folder, url, 2, key)
            digests.add(digest)
            print(f"through s3://: {seconds:.1f} s, {memory:.0f} MiB")
    print("all results are byte-identical" if len(digests) == 1 else f"RESULTS DIFFER: {digests}")


def write_shards(folder: Path, pictures: int, shards: int) -> None:
    generator = np.random.default_rng(0)
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:04d}.tar", "w") as archive:
            for number in range(shard * pictures // shards, (shard + 1) * pictures // shards):
                coarse = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                file = io.BytesIO()
                Image.fromarray(coarse).resize((32, 32)).save(file, "png")
                for suffix, content in {
                    "png": file.getvalue(),
                    "cls": str(number % 10).encode(),
                }.items():
                    entry = tarfile.TarInfo(f"{number:08d}.{suffix}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))


def prepare(
    folder: Path, path: str, workers: int, key: bytes, kill_after: float = 0.0
) -> tuple[float, float, str]:
    """Prepare the shards at `path` with an empty state directory.

    kill_after: seconds after which a first run is killed, or 0 for no such run. Returns seconds,
    MiB of the largest process, and a digest of the prepared set.
    """
    state = folder / "state"
    shutil.rmtree(state, ignore_errors=True)
    (state / "keys").mkdir(parents=True)
    (state / "keys/set").write_bytes(key)
    data = {
        "dataset_id": "set",
        "source": "webdataset",
        "path": path,
        "classes": [f"c{n}" for n in range(10)],
    }
    (folder / "params.yaml").write_text(yaml.safe_dump({"data": data}))
    if kill_after:
        killed = start(folder, state, workers)
        time.sleep(kill_after)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    began = time.perf_counter()
    process = start(folder, state, workers)
    memory = 0.0
    while process.poll() is None:
        memory = max(memory, *anonymous(process.pid), 0.0)
        time.sleep(0.05)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit((state / "refused.txt").read_text())
    digest = hashlib.sha256()
    for file in sorted((state / "data/set").rglob("*.npy")):
        digest.update(str(file.relative_to(state)).encode() + file.read_bytes())
    return seconds, memory, digest.hexdigest()


def start(folder: Path, state: Path, workers: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "stages.cli", "prepare", "sensitive", "--card", "card.json"]
    command += ["--workers", str(workers)]
    environment = os.environ | {
        "SFUMATO_STATE": str(state),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    return subprocess.Popen(
        command, cwd=folder, env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    )


def anonymous(root: int) -> Iterator[float]:
    """Yield the resident anonymous memory, in MiB, of a process and of each of its descendants."""
    try:
        processes = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
        for process in processes:
            status = Path(f"/proc/{process.pid}/status").read_text()
            yield next(
                (
                    int(line.split()[1]) / 1024
                    for line in status.splitlines()
                    if line.startswith("RssAnon")
                ),
                0,
            )
    except (psutil.NoSuchProcess, OSError):
        return


@contextmanager
def server(tars: Path) -> Iterator[None]:
    """Run a moto server with the shards in a bucket, and set the environment for its clients."""
    import boto3

    os.environ |= {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{PORT}"
    command = [sys.executable, "-m", "moto.server", "-p", str(PORT)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        for file in sorted(tars.glob("*.tar")):
            client.upload_file(str(file), BUCKET, file.name)
        yield
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
