"""Processes share the GPUs of a host; `tests/privacy/test_processes.py` tests their sums."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from sfumato.errors import ConfigError
from sfumato.runtime import compute, distributed


@pytest.fixture
def joined(monkeypatch, environment, cuda) -> Callable[[int, int, int], list[object]]:
    """Return a function that lets a process join. It returns the GPU that the process takes, and
    its group's backend.
    """
    found: list[object] = []
    monkeypatch.setattr(distributed, "launched", lambda: True)
    monkeypatch.setattr(compute, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: found.append(backend))

    def join(place: int, processes: int, cards: int) -> list[object]:
        found.clear()
        cuda(device_count=cards, set_device=found.append)
        environment["LOCAL_RANK"] = str(place)
        environment["LOCAL_WORLD_SIZE"] = str(processes)
        distributed.join()
        return [*found]

    return join


def test_each_process_takes_a_gpu_of_its_own(joined):
    assert [joined(place, 2, 4)[0] for place in range(2)] == [0, 1]


def test_more_processes_than_gpus_are_refused_once(joined):
    """If more processes than GPUs were started, NCCL would end each process with a page of text, or
    two processes would share a GPU's memory.
    """
    with pytest.raises(
        ConfigError, match=r"^SFUMATO_LAUNCH starts 4 processes for 2 GPUs: use --nproc-per-node=2$"
    ):
        joined(0, 4, 2)
    for place in (1, 2, 3):
        with pytest.raises(SystemExit) as ended:
            joined(place, 4, 2)
        assert ended.value.code == 0
