"""Where and how to run: the device, the precision, the number of threads, memory that is kept."""

import ctypes
import functools
import itertools
import os
import sys
import time
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from sfumato.errors import ConfigError

LARGE_NETWORK = 300_000  # weights; a smaller one loses more by conversion to bfloat16 than it gains
THREADS = torch.get_num_threads()  # as many as there are cores, or as OMP_NUM_THREADS says


def device() -> torch.device:
    """The device of `SFUMATO_DEVICE`, by default a GPU if there is one. Raises ConfigError for `cuda` without."""
    asked = os.environ.get("SFUMATO_DEVICE") or "auto"
    if asked not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"SFUMATO_DEVICE={asked} is not known: expected auto, cpu or cuda")
    if asked == "cpu":
        return torch.device("cpu")
    problem = no_cuda()
    if asked == "cuda" and problem:
        raise ConfigError(f"SFUMATO_DEVICE=cuda, and {problem}")
    return torch.device("cpu" if problem else "cuda")


@functools.cache
def no_cuda() -> str:
    """Why no GPU can be used, in a line; empty if one can. Prints torch's warning once, on standard error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if usable:
        return ""
    built = f"torch {torch.__version__} {'finds no GPU' if torch.version.cuda else 'was built without CUDA'}"
    said = " ".join(str(caught[0].message).split("\n")[0].split()) if caught else ""
    if said:
        print(f"no GPU is used: {said}", file=sys.stderr)
    return f"{built} here{f' ({said})' if said else ''}"


def device_of(module: nn.Module) -> torch.device:
    """Where a module is; the CPU if it has no numbers."""
    return next((part.device for part in itertools.chain(module.parameters(), module.buffers())), torch.device("cpu"))


def keep_freed_memory() -> None:
    """Let glibc, if there is one, keep freed memory for the next allocation, which saves a tenth of a training step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, in bytes, at its largest
        mallopt(-4, 0)  # M_MMAP_MAX: the kernel zeroes a block mapped by itself


def configure_processor() -> int:
    """Keep freed memory, and use 1, 2, 4, … or all threads: twice as many as long as small convolutions run faster now.

    Returns the number. OMP_NUM_THREADS keeps it. On shared cores, two threads were up to 25 times slower than one.
    """
    device()
    keep_freed_memory()
    every = torch.get_num_threads()
    if every == 1 or os.environ.get("OMP_NUM_THREADS"):
        return every
    chosen = 1
    fastest = 0.0
    for threads in [*(2**i for i in range(every.bit_length()) if 2**i < every), every]:
        if (speed := passes_per_second(threads)) < 1.15 * fastest:
            break
        chosen = threads
        fastest = speed
    torch.set_num_threads(chosen)
    return chosen


def passes_per_second(threads: int) -> float:
    """Passes of a small convolution and its gradient with so many threads, which stay set."""
    torch.set_num_threads(threads)
    images = torch.zeros(32, 64, 14, 14)
    weight = torch.zeros(64, 64, 3, 3, requires_grad=True)
    start = 0.0
    passes = -1  # one warms up
    while passes < 1 or time.perf_counter() - start < 0.1:
        F.silu(F.conv2d(images, weight, padding=1)).sum().backward()
        passes += 1
        start = start or time.perf_counter()
    return passes / (time.perf_counter() - start)


def fast_bfloat16(device: str) -> bool:
    """Whether the device has bfloat16 arithmetic. It is not timed, so that one machine always does the same."""
    if device == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)  # an older GPU imitates it, slowly
    return bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def prefers_bfloat16(model: nn.Module) -> bool:
    """Whether a free stage computes in bfloat16: by the device and the size of its network, so that runs are equal."""
    parameters = list(model.parameters())
    return fast_bfloat16(parameters[0].device.type) and sum(value.numel() for value in parameters) >= LARGE_NETWORK
