"""Test what an observer sees of DP-SGD: all that a step keeps, prints or saves depends only on the
released sum.

The same is tested for a generator that learns from the network trained by DP-SGD (DP-GAN).
"""

import pytest
import torch
from cases import GivenCharge, drawn_images
from dpsgd_runs import CLIP, draws_of, trainer
from dpsgd_runs import RUNS as OF_DPSGD
from parts import of_baselines

from sfumato.dpsgd import gradients
from sfumato.dpsgd.run import gradient_sum, step
from sfumato.privacy.events import Mechanism
from sfumato.privacy.odometer import PROGRESS

RUNS = OF_DPSGD | of_baselines("baseline_cases", "RUNS")
KINDS = {
    "finetune": {"step", "parameters", "ema", "exp_avg", "exp_avg_sq"},
    **of_baselines("baseline_cases", "KINDS"),
}


@pytest.mark.parametrize("draws", [1, 8])
def test_one_image_moves_a_steps_sum_by_the_clip_once(draws):
    """K noise copies of an image are one image: their mean is clipped, once."""
    charge = GivenCharge([drawn_images(1)])
    step(trainer(draws=draws), charge)
    ((total, bound),) = charge.seen
    assert bound == CLIP
    # The sum reaches the clip, because this gradient is far longer
    assert 0.9 * CLIP <= float(torch.linalg.vector_norm(total)) <= CLIP


@pytest.mark.parametrize("count", [1, 5, 9])
def test_kernels_get_batches_of_one_size(monkeypatch, count):
    """Kernels round differently for another batch size.

    An image's gradient would then depend on the number of other images.
    """
    sizes = set()
    inner = gradients.per_image_gradients

    def seen(model, parameters, images, *rest):
        sizes.add(len(images))
        return inner(model, parameters, images, *rest)

    monkeypatch.setattr(gradients, "per_image_gradients", seen)
    gradient_sum(trainer(), GivenCharge([drawn_images(count)]))
    assert sizes == {4}


@pytest.mark.parametrize("name", RUNS)
def test_a_step_follows_from_the_released_sum_alone(name):
    """If the released sum is the same, the step has the same result for other, more or no images.

    The result includes moments, rates, average, denominators, generated images, and the log.
    """
    run = RUNS[name]
    found = []
    for drawn in (draws_of(5, 5, 5), draws_of(9, 1, 30)[::-1], draws_of(0, 0, 2)):
        state = run.make()
        released = torch.randn(run.of(state).size, generator=torch.Generator().manual_seed(9))
        found.append((run.after(state, drawn, released), state.tensors()))
    (rows, tensors), *others = found
    assert all(row.keys() == {"step", "learning_rate", "noised_gradient_norm"} for row in rows)
    for other_rows, other in others:
        assert other_rows == rows and other.keys() == tensors.keys()
        assert all(torch.equal(value, other[name]) for name, value in tensors.items())


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_contains_weights_and_moments_only(name):
    """A checkpoint contains no sum before noise, and no random generator, which would reveal future
    draws.
    """
    state = RUNS[name].make()
    RUNS[name].after(state, draws_of(3))
    assert {key.split(".")[0] for key in state.tensors()} == KINDS[name]
    parameters = set(RUNS[name].of(state).parameters)
    for kind, _, rest in (key.partition(".") for key in state.tensors()):
        assert kind.startswith("generator") or rest in parameters or (kind == "step" and not rest)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_from_its_state(name):
    run = RUNS[name]
    drawn = draws_of(9, 9, 9, 9)
    straight = run.make()
    broken = run.make()
    resumed = run.make(seed=5)
    run.after(straight, drawn)
    run.after(broken, drawn[:2])
    resumed.load(broken.tensors())
    # only here: in a real run the draws after a resume are fresh
    run.of(resumed).generator.set_state(run.of(broken).generator.get_state())
    run.after(resumed, drawn[2:])
    again = resumed.tensors()
    assert all(torch.equal(value, again[key]) for key, value in straight.tensors().items())
    with pytest.raises(ValueError, match=r"exp_avg\."):
        resumed.load({key: value for key, value in again.items() if not key.startswith("exp_avg.")})


# --- what is on the disk --------------------------------------------------------------------------


@pytest.fixture
def durable(owner):
    """Return a function that runs a stage on the owner's images, and kills it after step `last`.

    Each step is saved. The function's attribute `opened` lists the charges of all runs, in order.
    """
    opened = []

    def run(name: str, last: int = -1, say=print):
        def open_charge():
            mechanism = Mechanism(noise_multiplier=2.0, sample_rate=0.01, uses=4)
            opened.append(owner.open(mechanism, stage=name, max_norm=CLIP))
            return opened[-1]

        def kill(done: int, total: int) -> None:
            if done == last:
                opened[-1]._lock.close()
                raise KeyboardInterrupt

        state = RUNS[name].make(seed=last, checkpoint_every=1)
        return RUNS[name].train(state, open_charge, epsilon_after=float, report=kill, say=say)

    run.opened = opened
    return run


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_resumes_and_is_charged_once(name, durable, owner):
    told = []
    for last in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            durable(name, last, told.append)
    charge, log = durable(name, say=told.append)
    assert [row["epsilon"] for row in log] == [1, 2, 3, 4] and [row["step"] for row in log] == [
        1,
        2,
        3,
        4,
    ]
    assert told == [
        f"{name}: resuming run {charge.run.name[:8]} after step {n}, at no further cost"
        for n in (1, 3)
    ]
    assert len({charge.record["id"] for charge in durable.opened}) == 3
    assert owner.odometer.opened() == [charge.record]


def test_a_step_that_is_not_on_disk_is_not_journalled(durable, owner, monkeypatch):
    """If such a step were journalled, a run would resume after a step that is lost."""

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("sfumato.privacy.resume.save_checkpoint", full)
    with pytest.raises(OSError, match="no space"):
        durable("finetune")
    assert [entry for entry in owner.odometer.entries() if entry["kind"] == PROGRESS] == []
    assert len(durable.opened) == 1


def test_a_run_that_lost_its_checkpoint_is_paid_for_again(durable, owner):
    """The first steps were released before the kill.

    Under the same record, the second run would release them again, but pay only once.
    """
    with pytest.raises(KeyboardInterrupt):
        durable("finetune", 1)
    for path in durable.opened[0].run.glob("checkpoint-*"):
        path.unlink()
    durable("finetune")
    assert len(owner.odometer.opened()) == 2 and len(owner.odometer.events()) == 2
