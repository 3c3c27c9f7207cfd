"""Run three queries on two simulated hosts and in one process, and compare the results.

    python benchmarks/two_hosts.py

The program needs Linux, and must be run as root. The hosts are two network namespaces, joined by a
virtual cable. `tests/privacy/many_processes.py` runs once in one process, and once in two processes
that can reach each other only over the cable. `torchrun --nnodes=2` starts the two processes, as it
would on a cluster. Both use the same state directory. The queries are count, frequency and DP-SGD
on digits. Their draws depend only on image and step. The program prints the largest differences of
the releases and of the weights, and the number of charges in each journal. The namespaces are
removed at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from sfumato.data.prepare import prepare_sensitive
from sfumato.data.store import read_card
from sfumato.privacy.odometer import Odometer
from sfumato.settings.data import Data

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "privacy" / "many_processes.py"
HOSTS = {f"sfumato-{os.getpid()}-{i}": f"10.77.0.{i + 1}" for i in range(2)}
# Tolerance for releases, and for weights after five steps. Two hosts add float32 numbers in a
# different order than one process does.
CLOSE = 1e-5
ALIKE = (
    "count",
    "frequency",
)  # Queries with a fixed seed for their noise, so that their releases can be compared


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def prepared(folder: Path) -> Path:
    """Prepare a state directory with the digits, always with the same hold-out."""
    (folder / "state" / "keys").mkdir(parents=True, mode=0o700)
    (folder / "state" / "keys" / "digits").write_bytes(bytes(range(32)))
    prepare_sensitive(Data(), folder / "state", folder / "card.json", folder / "raw")
    (folder / "out").mkdir()
    return folder


def arguments(folder: Path) -> list[str]:
    return [str(SCRIPT), *(str(folder / name) for name in ("state", "card.json", "out"))]


def on_two_hosts(folder: Path) -> None:
    """Run the script on both hosts. Raises SystemExit if a host fails."""
    names = list(HOSTS)
    try:
        for name in names:
            ip("netns", "add", name)
        ends = [f"sfu{os.getpid()}{i}"[:15] for i in range(2)]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end in zip(names, ends, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{HOSTS[name]}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=1",
        ]
        running = []
        for rank, (name, end) in enumerate(zip(names, ends, strict=True)):
            place = [
                f"--node-rank={rank}",
                f"--master-addr={HOSTS[names[0]]}",
                "--master-port=29500",
            ]
            running.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *torchrun, *place, *arguments(folder)],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": end},
                )
            )
        if any([child.wait() for child in running]):
            raise SystemExit("the script failed on a host: see its output above")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        one, two = prepared(Path(name) / "one"), prepared(Path(name) / "two")
        subprocess.run(
            [sys.executable, *arguments(one)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
        )
        on_two_hosts(two)
        alone = torch.load(one / "out" / "rank-0.pt")
        together = [torch.load(two / "out" / f"rank-{rank}.pt") for rank in range(2)]
        compared = [key for key in alone if key in ALIKE or key.startswith("weights.")]
        worst = {key: (alone[key] - together[0][key]).abs().max().item() for key in compared}
        same = all(torch.equal(together[0][key], together[1][key]) for key in compared)
        weights = max(value for key, value in worst.items() if key.startswith("weights."))
        print(
            f"largest differences: count {worst['count']:.1e}, frequency "
            f"{worst['frequency']:.1e}, weights {weights:.1e}"
        )
        print(f"the results on both hosts are identical, bit for bit: {same}")
        drawn = [sum(len(part["mine"]) for part in parts) for parts in ([alone], together)]
        print(f"images in one draw: {drawn[0]} in one process, {drawn[1]} on both hosts together")
        charges = [
            len(Odometer(f / "state", read_card(f / "card.json").dataset_id).opened())
            for f in (one, two)
        ]
        print(f"charges in the journal: {charges[0]} by one process, {charges[1]} by two hosts")
        if (
            not same
            or max(worst.values()) > CLOSE
            or charges[0] != charges[1]
            or drawn[0] != drawn[1]
        ):
            raise SystemExit("two hosts and one process give different results: see above")


if __name__ == "__main__":
    main()
