import pytest
import torch
from failing_reads import failing_opens

from sfumato.privacy.checkpoint import (
    checkpoint_path,
    drop_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from sfumato.privacy.events import Mechanism
from sfumato.privacy.resume import make_durable, resume

STATE = {"parameters.a": torch.arange(4.0), "step": torch.tensor(7)}
LOG = [{"step": 7, "epsilon": 0.5}]


def test_state_and_log_are_restored_unless_damaged(tmp_path):
    assert load_checkpoint(tmp_path, 7, None) is None
    save_checkpoint(tmp_path, 7, STATE, LOG)
    state, log = load_checkpoint(tmp_path, 7, None)
    assert (
        torch.equal(state["parameters.a"], STATE["parameters.a"])
        and int(state["step"]) == 7
        and log == LOG
    )
    path = checkpoint_path(tmp_path, 7)
    path.write_bytes(path.read_bytes()[:40])
    assert load_checkpoint(tmp_path, 7, None) is None


@pytest.mark.parametrize(("run", "uses"), [("other", 7), ("run", 8)])
def test_a_checkpoint_of_another_run_or_step_is_not_taken(tmp_path, run, uses):
    for name in ("run", "other"):
        (tmp_path / name).mkdir()
    save_checkpoint(tmp_path / "run", 7, STATE, LOG)
    checkpoint_path(tmp_path / "run", 7).rename(checkpoint_path(tmp_path / run, uses))
    assert load_checkpoint(tmp_path / run, uses, None) is None


def test_only_the_journalled_checkpoint_is_kept(tmp_path):
    for uses in (5, 6, 7):
        save_checkpoint(tmp_path, uses, STATE, LOG)
    drop_checkpoints(tmp_path, keep=7)
    assert list(tmp_path.iterdir()) == [checkpoint_path(tmp_path, 7)]
    drop_checkpoints(tmp_path)
    assert not list(tmp_path.iterdir())


# Places of the flipped bit: the last tensor, the tensor before it, the header with the log
@pytest.mark.parametrize("place", [-1, -12, 40])
def test_a_checkpoint_with_a_flipped_bit_is_not_gone_on_from(owner, place):
    mechanism = Mechanism(noise_multiplier=2.0, sample_rate=0.3, uses=3)
    said = []
    for flipped in (0, 1):
        charge = owner.open(mechanism)
        assert list(charge.batches(size=100)) is not None
        charge.release(torch.zeros(1), 1.0)
        make_durable(charge, STATE, LOG)
        charge._lock.close()
        path = checkpoint_path(charge.run, 1)
        content = bytearray(path.read_bytes())
        content[place] ^= flipped
        path.write_bytes(content)
        resumed, state, _ = resume(lambda: owner.open(mechanism), "count", said.append)
        assert (resumed.used, state is None) == ((1, False), (0, True))[flipped]
        resumed.abandon()
    assert len(owner.odometer.opened()) == 3 and "is lost" in said[-1]


def test_a_checkpoint_on_a_failing_disk_is_not_paid_again(owner):
    mechanism = Mechanism(noise_multiplier=2.0, sample_rate=0.3, uses=3)
    said = []
    charge = owner.open(mechanism)
    assert list(charge.batches(size=100)) is not None
    charge.release(torch.zeros(1), 1.0)
    make_durable(charge, STATE, LOG)
    charge._lock.close()
    with failing_opens("checkpoint-"), pytest.raises(OSError):
        resume(lambda: owner.open(mechanism), "count", said.append)
    assert len(owner.odometer.opened()) == 1 and not said
