import platform
import subprocess
import sys

import pytest
import torch

from sfumato.compute import settle_threads

KEPT = """
import gc, sys, torch
from sfumato.compute import keep_freed_memory
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
if sys.argv[1] == "keep":
    keep_freed_memory()
parts = [torch.ones(2**20) for _ in range(50)]
full = resident()
del parts
print(full - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_kept():
    given_back = {
        word: int(subprocess.run([sys.executable, "-c", KEPT, word], capture_output=True, check=True, text=True).stdout)
        for word in ("keep", "no")
    }
    assert given_back["keep"] < 20_000 < 150_000 < given_back["no"]  # KiB, of 200 MiB


def test_the_users_word_stays(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert settle_threads() == before == torch.get_num_threads()


def test_one_or_all_threads_are_used_and_the_choice_is_in_force(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        torch.set_num_threads(2)
        assert settle_threads() in (1, 2)
        assert settle_threads() == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
