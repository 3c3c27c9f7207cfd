"""Start a group of processes, as `torchrun` does.

They are forked from one process that has already imported the libraries.
"""

import multiprocessing
import os
from collections.abc import Callable

from torch.distributed import TCPStore
from torch.multiprocessing import start_processes

LIBRARIES = [
    "torch",
    "torch.distributed",
    "scipy.stats",
    "sklearn.datasets",
    "opacus",
    "dp_accounting",
    "torchvision",
]


def run_joined(count: int, work: Callable[..., None], *given: object) -> None:
    """Run `work(*given)` in `count` processes.

    work: a function of a module, which joins the group. A single process has no group. Raises
    ProcessException if a process fails or is killed, after ending the others.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(count)}
    group |= {"TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    multiprocessing.get_context("forkserver").set_forkserver_preload(LIBRARIES)
    start_processes(
        one_of, (group if count > 1 else {}, work, given), nprocs=count, start_method="forkserver"
    )


def one_of(
    rank: int, group: dict[str, str], work: Callable[..., None], given: tuple[object, ...]
) -> None:
    os.environ |= {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    work(*given)
