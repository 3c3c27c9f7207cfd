"""Run one stage in several processes, which `torchrun` starts.

Without `torchrun`, the functions work on the values of the only process.

Only the first process draws images, adds the noise and writes the artifact. The other processes
read their shares of the drawn images, but get the sum over all drawn images only with noise. All
processes belong to the owner, so they trust each other. Functions that broadcast, reduce, gather or
compare are collective calls: every process must call them.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import is_torchelastic_launched as launched  # started by `torchrun`

from sfumato.errors import ConfigError
from sfumato.runtime import compute

T = TypeVar("T")
R = TypeVar("R")


def join() -> None:
    """Join the other processes of `torchrun`, if it started this process.

    Raises ConfigError if there are fewer GPUs than processes on this machine.
    """
    if not launched() or dist.is_initialized():
        return
    gpus = compute.device().type == "cuda"
    if gpus:
        local_rank = int(os.environ["LOCAL_RANK"])
        cards = torch.cuda.device_count()
        if (count := int(os.environ["LOCAL_WORLD_SIZE"])) > cards:
            if local_rank > 0:
                raise SystemExit(0)
            raise ConfigError(
                f"SFUMATO_LAUNCH starts {count} processes for {cards} GPUs: use "
                f"--nproc-per-node={cards}"
            )
        torch.cuda.set_device(local_rank)
    # The other processes may wait long while the first one encodes or trains
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=timedelta(hours=24))


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    if not dist.is_initialized():
        return 0
    return dist.get_rank()


def world_size() -> int:
    if not dist.is_initialized():
        return 1
    return dist.get_world_size()


def is_main() -> bool:
    return rank() == 0


def broadcast_object(value: T) -> T:
    """Return the first process's value in all processes."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@torch.no_grad()
def agree(tensors: Iterable[Tensor], *plain: object) -> None:
    """Set tensors, in place, to their values in the first process, and check that `plain` is the
    same in all processes.

    The tensors are copied because results of different processes may differ in the last bits.
    Raises ConfigError in all processes if `plain` or the sum of the received bytes differs between
    processes.
    """
    if world_size() > 1:
        tensors = [*tensors]
        parts = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]
        # One broadcast for all tensors, because each broadcast waits for all processes
        flat = broadcast(torch.cat(parts))
        for tensor, part in zip(tensors, flat.split([len(part) for part in parts]), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))
        values = (*plain, int(flat.sum()))
        _refuse_unless(broadcast_object(values) == values)


def check_alike(parts: Sequence[Tensor]) -> None:
    """Raise ConfigError in all processes unless all have equal `parts`, up to rounding."""
    if world_size() > 1:
        own_parts = [part.detach().cpu().double() for part in parts]
        pairs = [
            (part, broadcast(part.clone(memory_format=torch.contiguous_format)))
            for part in own_parts
        ]
        # The tolerance covers different processors, but not different precisions.
        _refuse_unless(all(torch.allclose(a, b, 1e-5, 1e-5, equal_nan=True) for a, b in pairs))


def _refuse_unless(alike: bool) -> None:
    if not all_min(alike):
        raise ConfigError(
            "the processes compute different numbers, so their results must not be added up: start "
            "the processes on machines of one kind with the same installation, or run without "
            "SFUMATO_LAUNCH"
        )


def reduce_sum(part: Tensor) -> Tensor:
    """Return the sum of `part` over all processes, in the first process.

    In the other processes, the result is undefined.
    """
    if world_size() > 1:
        part = part.detach().clone()
        dist.reduce(part, dst=0)
    return part


def map_sharded(tasks: Sequence[T], work: Callable[[T], R]) -> list[R]:
    """Apply `work` to each task. The processes divide the tasks.

    Returns all results, in the order of the tasks, in every process.
    """
    own_results = [work(task) for task in tasks[rank() :: world_size()]]
    if world_size() == 1:
        return own_results
    parts: list[list[R]] = [[]] * world_size()
    dist.all_gather_object(parts, own_results)
    return [parts[index % world_size()][index // world_size()] for index in range(len(tasks))]


def all_min(count: int) -> int:
    """Return the smallest of the processes' numbers, in every process."""
    if world_size() == 1:
        return count
    box = torch.tensor(count)
    dist.all_reduce(box, dist.ReduceOp.MIN)
    return int(box)


def all_reduce(parts: Sequence[Tensor]) -> list[Tensor]:
    """Sum each tensor over all processes. Every process gets the same result, to the last bit."""
    if world_size() == 1:
        return list(parts)
    flat = torch.cat([part.detach().flatten() for part in parts])
    dist.all_reduce(flat)
    sums = flat.split([part.numel() for part in parts])
    return [value.view_as(part) for value, part in zip(sums, parts, strict=True)]


def local_shard(tensor: Tensor) -> Tensor:
    return tensor[rank() :: world_size()]


def all_gather(rows: Tensor, count: int) -> Tensor:
    """Return all `count` rows in all processes.

    rows: rows of this process. The processes divide all rows as `local_shard` does.
    """
    if world_size() == 1:
        return rows
    gathered = rows.new_zeros(count, *rows.shape[1:])
    gathered[rank() :: world_size()] = rows
    return all_reduce([gathered])[0]


def broadcast(tensor: Tensor) -> Tensor:
    """Return the first process's tensor in every process.

    The tensors of all processes must have the same shape and type. They are overwritten.
    """
    if world_size() > 1:
        dist.broadcast(tensor, src=0)
    return tensor
