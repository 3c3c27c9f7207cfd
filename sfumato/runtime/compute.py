"""Choose the device, the precision, the number of threads, and whether to keep freed memory."""

import ctypes
import functools
import itertools
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch
from torch import nn

from sfumato.errors import ConfigError

# Number of weights below which conversion to bfloat16 costs more than it saves
LARGE_NETWORK = 300_000
ONE_AT_A_TIME = RLock()
THREADS = torch.get_num_threads()  # Number of cores, or OMP_NUM_THREADS if it is set


def device() -> torch.device:
    """Return the device that `SFUMATO_DEVICE` names; by default, a GPU if there is one.

    Raises ConfigError if `cuda` is set and there is no GPU, or if the value is unknown.
    """
    requested = os.environ.get("SFUMATO_DEVICE") or "auto"
    if requested not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"SFUMATO_DEVICE={requested} is not known: expected auto, cpu or cuda")
    if requested == "cpu":
        return torch.device("cpu")
    problem = no_cuda()
    if requested == "cuda" and problem:
        raise ConfigError(
            f"SFUMATO_DEVICE=cuda cannot be used: {problem}. Use a torch with CUDA on a machine "
            "with a GPU, or set SFUMATO_DEVICE=cpu"
        )
    return torch.device("cpu" if problem else "cuda")


@functools.cache
def no_cuda() -> str:
    """Return the reason why no GPU can be used, in one line; an empty text if one can be used.

    If PyTorch warns about the GPU, its warning is printed once, on standard error.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if usable:
        return ""
    built = f"torch {torch.__version__} was built without CUDA"
    if torch.version.cuda:
        built = f"torch {torch.__version__} finds no GPU on this machine"
    warning = " ".join(str(caught[0].message).split("\n")[0].split()) if caught else ""
    if warning:
        print(f"no GPU is used: {warning}", file=sys.stderr)
    return f"{built}{f' ({warning})' if warning else ''}"


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module; the CPU if it has no parameters and no buffers."""
    return next(
        (part.device for part in itertools.chain(module.parameters(), module.buffers())),
        torch.device("cpu"),
    )


def keep_freed_memory() -> None:
    """Let glibc, if present, keep freed memory: this shortens a training step by a tenth."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, in bytes: the largest value
        # M_MMAP_MAX: no separate mappings, because the kernel would fill each one with zeros
        mallopt(-4, 0)


def fast_bfloat16(device: str) -> bool:
    """Return whether the device has bfloat16 arithmetic.

    The answer does not depend on a measured speed, so it never changes on one machine.
    """
    if device == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)  # an older GPU emulates it, slowly
    return bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def prefers_bfloat16(model: nn.Module) -> bool:
    """Return whether a free stage computes in bfloat16.

    The answer depends only on the device and on the size of the network.
    """
    parameters = list(model.parameters())
    return (
        fast_bfloat16(parameters[0].device.type)
        and sum(value.numel() for value in parameters) >= LARGE_NETWORK
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit PyTorch to one thread. Only one Python thread at a time can be in the block.

    The limit applies to the whole process. For a batch of one image, several threads are slower.
    They may also add up numbers in another order, which changes the last bits of the result.
    """
    with ONE_AT_A_TIME:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
