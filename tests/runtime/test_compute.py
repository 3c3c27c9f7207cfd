import platform
import subprocess
import sys
import warnings

import pytest
import torch

from sfumato.errors import ConfigError
from sfumato.runtime.compute import device, device_of, fast_bfloat16, no_cuda

KEPT = """
import gc, sys, torch
from sfumato.runtime.compute import keep_freed_memory
def resident():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
if sys.argv[1] == "keep":
    keep_freed_memory()
parts = [torch.ones(2**24) for _ in range(3)]
full = resident()
del parts
print(full - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_kept():
    given_back = {
        word: int(
            subprocess.run(
                [sys.executable, "-c", KEPT, word], capture_output=True, check=True, text=True
            ).stdout
        )
        for word in ("keep", "no")
    }
    assert given_back["keep"] < 20_000 < 150_000 < given_back["no"]  # KiB given back, of 192 MiB


def test_a_missing_gpu_is_an_error_if_requested(environment, cuda):
    environment["SFUMATO_DEVICE"] = "cpu"
    assert device().type == "cpu"
    environment["SFUMATO_DEVICE"] = "gpu"
    with pytest.raises(ConfigError, match=r"SFUMATO_DEVICE=gpu.*auto, cpu or cuda"):
        device()
    cuda(is_available=False)
    no_cuda.cache_clear()
    environment["SFUMATO_DEVICE"] = "cuda"
    with pytest.raises(ConfigError, match="SFUMATO_DEVICE=cuda cannot be used: torch"):
        device()
    del environment["SFUMATO_DEVICE"]
    assert device().type == "cpu"
    no_cuda.cache_clear()


def test_an_old_driver_is_reported_once_in_one_line(cuda, capsys):
    def old() -> bool:
        warnings.warn(
            "The NVIDIA driver on your system is too old\n  (found 1.0)", UserWarning, stacklevel=2
        )
        return False

    cuda(is_available=old)
    no_cuda.cache_clear()
    assert device().type == device().type == "cpu"
    no_cuda.cache_clear()
    assert (
        capsys.readouterr().err == "no GPU is used: The NVIDIA driver on your system is too old\n"
    )


@pytest.mark.parametrize(
    ("capability", "known"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((9, 0), True)]
)
def test_a_gpu_before_ampere_has_no_bfloat16(cuda, capability, known):
    cuda(get_device_capability=capability)
    assert fast_bfloat16("cuda") is known


def test_a_module_is_on_the_device_of_its_numbers():
    with torch.device("meta"):
        norm = torch.nn.BatchNorm2d(3, affine=False)
    assert device_of(norm).type == "meta" and device_of(torch.nn.ReLU()).type == "cpu"
    assert device_of(torch.nn.Linear(2, 2, device="meta")).type == "meta"
