import time

import torch

from sfumato.runtime.compute import is_faster


def test_the_faster_way_is_chosen_and_measured_once():
    calls = []

    def step(autocast: bool) -> None:
        calls.append(autocast)
        time.sleep(0.001 if autocast else 0.02)

    cpu = torch.device("cpu")
    assert is_faster(step, "slow in float32", cpu)
    count = len(calls)
    assert is_faster(step, "slow in float32", cpu) and len(calls) == count
    assert not is_faster(lambda autocast: step(not autocast), "slow in bfloat16", cpu)
