"""Open charges from many processes with kills, full disks, forks and wrong clocks, and count them.

    python benchmarks/charges.py --charges 2000 --processes 8 --kills 200 --seed 0

All processes spend on one dataset in one state directory. Then they do the same in further state
directories, one after another. Each process has a share of the work items. For each item it opens a
charge, draws, releases, and closes the charge. Each item is given to two processes, so that they
race for it. Now and then a process is killed (SIGKILL), finds its disk full, has its clock set
back, or forks a child that tries to use its charge. A killed process is restarted with the same
share. In the end, the journal must be valid and contain one charge per work item, opened once and
closed once. In the last state directory, the lifetime budget suffices for only half of the items,
so the journal must contain charges for exactly half of the items.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from sfumato.data.prepare import prepare_sensitive
from sfumato.data.store import Card, read_card
from sfumato.errors import BudgetError
from sfumato.privacy.accountant import epsilon
from sfumato.privacy.authorize import AlreadyReleasedError, ChargeRequest, open_charge
from sfumato.privacy.charge import Charge
from sfumato.privacy.decision import RELEASED
from sfumato.privacy.events import Mechanism
from sfumato.privacy.odometer import CLOSE, OPEN, Odometer
from sfumato.privacy.policy import SpendingPolicy
from sfumato.settings.data import Data
from sfumato.storage.artifacts import writing

MECHANISM = Mechanism(noise_multiplier=5.0)
DELTA = 1e-5
FREE = SpendingPolicy(delta=DELTA, lifetime_epsilon="unlimited")


def work_of(number: int) -> ChargeRequest:
    return ChargeRequest(
        stage="count",
        plan=f"plan {number}",
        settings=f"settings {number}",
        mechanism=MECHANISM,
        max_norm=1.0,
        released="x",
        sensitivity="1",
    )


def spend(
    state: Path,
    card: Card,
    number: int,
    permission: SpendingPolicy,
    fault: Callable[[Charge], None],
) -> None:
    """Do one work item as a query does. fault: called with the open charge, to disturb it.

    Once the artifact has its final name in the run's directory, the item counts as released.
    """
    charge = open_charge(state, card, work_of(number), permission)
    fault(charge)
    for _ in charge.batches(size=500):
        pass
    charge.release(torch.zeros(3), max_norm=1.0)
    with writing(charge.run / RELEASED, charge.record["stage"], records=[charge.record]):
        pass
    charge.close()


def worker(state: Path, card: Card, mine: list[int], permission: SpendingPolicy, seed: int) -> None:
    """Spend on each work item that is not released yet, with a fault now and then."""
    chance, real = random.Random(seed), time.time
    for number in mine:
        kind = chance.choice(["none"] * 17 + ["disk", "clock", "fork"])
        if kind == "clock":
            time.time = lambda: real() - chance.randrange(10**9)  # type: ignore[method-assign]
        try:
            if kind == "disk":
                fill_the_disk(state, card, number, permission)
            spend(
                state,
                card,
                number,
                permission,
                fork_and_go_on if kind == "fork" else lambda _: None,
            )
        except AlreadyReleasedError:
            continue  # another worker released this item, or this one did before a kill
        except BudgetError as error:
            if "locked by another" not in str(error) and "lifetime_epsilon" not in str(error):
                raise
        finally:
            time.time = real  # type: ignore[method-assign]


def fill_the_disk(state: Path, card: Card, number: int, permission: SpendingPolicy) -> None:
    """Check that no charge is opened if the journal has room for only half a line."""
    # Room for half a line. If other processes add entries now, less room is left
    room = Odometer(state, card.dataset_id).path.stat().st_size + 200
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        open_charge(state, card, work_of(number), permission)
    except (BudgetError, OSError):
        return
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    raise AssertionError("a charge was opened although the journal had no room for it")


def fork_and_go_on(charge: Charge) -> None:
    """Check that a forked child cannot draw images."""
    child = os.fork()
    if child == 0:
        try:
            list(charge.batches(size=10))
        except BudgetError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, "a forked child drew images with its parent's charge"


def start(state: Path, card: Card, mine: list[int], permission: SpendingPolicy, seed: int) -> int:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        code = 1
        try:
            worker(state, card, mine, permission, seed)
            code = 0
        except BaseException as error:
            print(f"worker: {error!r}", flush=True)
        finally:
            os._exit(code)
    return child


def race(
    state: Path,
    card: Card,
    charges: int,
    processes: int,
    kills: int,
    permission: SpendingPolicy,
    chance: random.Random,
) -> int:
    """Run the processes until all items are done, and kill some. Returns the number of kills."""
    shares = [
        [n for n in range(charges) if n % processes in (i, (i + 1) % processes)]
        for i in range(processes)
    ]
    running = {
        start(state, card, share, permission, chance.randrange(2**32)): share for share in shares
    }
    killed = 0
    try:
        while running:
            time.sleep(chance.uniform(0.02, 0.25))
            if killed < kills:
                os.kill(chance.choice(list(running)), signal.SIGKILL)
                killed += 1
            for child in list(running):
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    share = running.pop(child)
                    if os.WIFSIGNALED(status):
                        running[start(state, card, share, permission, chance.randrange(2**32))] = (
                            share
                        )
                    elif status:
                        raise AssertionError("a process failed without being killed")
    finally:
        for child in running:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return killed


def check(odometer: Odometer, wanted: int | None) -> int:
    """Check that each charge was opened and closed once. Returns the number of charges.

    Raises AssertionError if not. wanted: expected number of charges, or None for any.
    """
    entries = odometer.entries()  # also verifies the journal's hash chain
    opened = Counter(entry["work"] for entry in entries if entry["kind"] == OPEN)
    closed = Counter(entry["id"] for entry in entries if entry["kind"] == CLOSE)
    runs = {entry["record"]["id"] for entry in entries if entry["kind"] == OPEN}
    assert not opened or max(opened.values()) == 1, f"charged twice: {opened.most_common(3)}"
    assert set(closed) == runs and set(closed.values()) <= {1}, (
        "some charge was not closed exactly once"
    )
    assert wanted is None or len(opened) == wanted, f"{len(opened)} charges, expected {wanted}"
    assert len({record["id"] for record in odometer.opened()}) == len(opened)
    return len(opened)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--charges", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--journals", type=int, default=8, help="Number of state directories.")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="charges-") as name:
        each = (arguments.charges // arguments.journals, arguments.kills // arguments.journals)
        for part, charges, kills in [
            *((f"free {i}", *each) for i in range(arguments.journals)),
            ("bounded", 40, 10),
        ]:
            state, begun = Path(name) / part, time.perf_counter()
            prepare_sensitive(Data(), state, state / "card.json", state / "raw")
            card = read_card(state / "card.json")
            half = epsilon([MECHANISM.event] * (charges // 2), DELTA) * (1 + 1e-9)
            permission = (
                FREE if part != "bounded" else SpendingPolicy(delta=DELTA, lifetime_epsilon=half)
            )
            killed = race(state, card, charges, arguments.processes, kills, permission, chance)
            opened = check(
                Odometer(state, card.dataset_id), charges if part != "bounded" else charges // 2
            )
            seconds = time.perf_counter() - begun
            print(
                f"{part}: {charges} work items, {arguments.processes} processes, {killed} kills: "
                f"{opened} charges, none lost or made twice ({seconds:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
