import pytest
import torch

from sfumato.diffusion.ema import EMA


def test_a_long_run_decays_at_its_rate_and_keeps_a_constant():
    ema = EMA({"a": torch.zeros(1), "constant": torch.full((3,), 2.0)})
    ema.decay = 0.9
    ema.steps = 10_000
    for _ in range(7):
        ema.update({"a": torch.ones(1), "constant": torch.full((3,), 2.0)})
    assert float(ema.average["a"]) == pytest.approx(1 - 0.9**7, rel=1e-5)
    assert torch.allclose(ema.average["constant"], torch.full((3,), 2.0))


def test_a_short_run_forgets_its_start():
    ema = EMA({"a": torch.zeros(1)})
    ema.decay = 0.9999
    for _ in range(50):
        ema.update({"a": torch.ones(1)})
    assert float(ema.average["a"]) > 0.99  # a fixed decay would give 0.005


def test_the_average_is_a_copy_and_zero_decay_follows():
    values = {"a": torch.zeros(2, requires_grad=True)}
    ema = EMA(values)
    ema.decay = 0.0
    with torch.no_grad():
        values["a"].add_(1)
    assert not ema.average["a"].any()
    assert not ema.average["a"].requires_grad
    ema.update(values)
    assert ema.average["a"].tolist() == [1, 1]
