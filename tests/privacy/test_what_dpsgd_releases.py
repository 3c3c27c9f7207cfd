"""DP-SGD as an observer sees it: what a step keeps, shows and saves follows from the released sum alone."""

import pytest
import torch
from cases import GivenCharge
from torch import Tensor

from sfumato.diffusion.unet import UNet
from sfumato.dpsgd import gradients
from sfumato.dpsgd.run import State, fine_tune, gradient_sum, step
from sfumato.dpsgd.trainable import candidates
from sfumato.privacy import checkpoint
from sfumato.privacy.events import Mechanism
from sfumato.privacy.odometer import PROGRESS
from sfumato.queries.saliency import query_saliency
from sfumato.settings.dpsgd import Finetune, Saliency

C = 1e-4  # far below any gradient, so that every image is clipped


def trainer(seed: int = 0, **options) -> State:
    torch.manual_seed(seed)
    model = UNet(8, 1, 4, width=8, multipliers=(1,), attention=(0,))
    config = Finetune(**{"draws": 2, "max_grad_norm": C, "learning_rate": 1e-3, "microbatch_size": 4, **options})
    return State(model, config, public_batch=16.0, autocast=False, generator=torch.Generator().manual_seed(seed))


def images(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 8, 8, generator=random), torch.randint(4, (count,), generator=random)


@pytest.mark.parametrize("draws", [1, 8])
def test_one_image_moves_a_step_s_sum_by_the_clip_however_often_it_is_drawn(draws):
    """K noise copies of an image are one image: their mean is clipped, once."""
    charge = GivenCharge([images(1)])
    step(trainer(draws=draws), charge)
    ((total, bound),) = charge.seen
    assert bound == C
    assert 0.9 * C <= float(torch.linalg.vector_norm(total)) <= C  # the whole clip, for this gradient is far longer


@pytest.mark.parametrize("draws", [1, 8])
def test_one_image_moves_the_saliency_sum_by_the_clip_however_often_it_is_drawn(draws):
    torch.manual_seed(0)
    model = UNet(8, 1, 4, width=8, multipliers=(1,), attention=(0,))
    for value in model.parameters():  # some begin at zero, and then no gradient reaches the matrices
        torch.nn.init.normal_(value, std=0.2)
    settings = Saliency(noise=1.0, draws=draws, max_norm=C, microbatch_size=2)
    charge = GivenCharge([images(1)])
    query_saliency(charge, model, candidates(model, "qkv"), settings, 10.0, generator=torch.Generator().manual_seed(1))
    ((total, bound),) = charge.seen
    assert bound == C and 0.9 * C <= float(torch.linalg.vector_norm(total)) <= C * (1 + 1e-6)


@pytest.mark.parametrize("count", [1, 5, 9])
def test_kernels_see_batches_of_one_size_however_many_images_were_drawn(monkeypatch, count):
    """They round differently for another size: an image's gradient would then depend on how many others there are."""
    sizes, inner = set(), gradients.per_image_gradients

    def seen(model, parameters, images, *rest):
        sizes.add(len(images))
        return inner(model, parameters, images, *rest)

    monkeypatch.setattr(gradients, "per_image_gradients", seen)
    gradient_sum(trainer(), GivenCharge([images(count)]))
    assert sizes == {4}


def outcome(drawn: list[tuple[Tensor, Tensor]]) -> tuple[dict[str, Tensor], list[dict]]:
    """The state after steps on these draws, and the rows of the log, under released sums that are always the same."""
    state = trainer()
    given = torch.randn(state.size, generator=torch.Generator().manual_seed(9))
    charge = GivenCharge(drawn, given)
    rows = [step(state, charge) for _ in drawn]
    assert len(charge.seen) == len(drawn)
    return state.tensors(), rows


def test_a_step_follows_from_the_released_sum_alone():
    """Moments, rates, average, denominators, stopping and the log: all the same for other images, more, or none."""
    tensors, rows = outcome([images(5), images(5, 1), images(5, 2)])
    for other in ([images(9, 3), images(1, 4), images(30, 5)], [images(0), images(0), images(2, 6)]):
        others, other_rows = outcome(other)
        assert other_rows == rows
        assert others.keys() == tensors.keys()
        assert all(torch.equal(value, others[name]) for name, value in tensors.items())


def test_a_checkpoint_holds_weights_average_and_moments_and_nothing_else():
    """Neither a sum before its noise nor a generator, by which draws to come would be known."""
    state = trainer()
    step(state, GivenCharge([images(3)]))
    kinds = {name.split(".")[0] for name in state.tensors()}
    assert kinds == {"step", "parameters", "ema", "exp_avg", "exp_avg_sq"}
    names = set(state.parameters)
    for name in state.tensors():
        kind, _, rest = name.partition(".")
        assert rest in names or (kind == "step" and not rest), name


def test_a_step_s_row_says_what_it_may_and_no_more():
    row = step(trainer(), GivenCharge([images(3)]))
    assert row.keys() == {"step", "learning_rate", "noised_gradient_norm"}


def durable_run(owner, monkeypatch=None, **mechanism):
    """A run of DP-SGD on the owner's images, and the charges that it opened."""
    charges = []

    def open_charge():
        charges.append(
            owner.open(Mechanism(noise_multiplier=2.0, sample_rate=0.005, uses=3), stage="finetune", max_norm=C)
        )
        return charges[-1]

    return charges, lambda: fine_tune(trainer(checkpoint_every=1), open_charge, epsilon_after=float)


def test_a_step_that_is_not_on_disk_is_not_journalled(owner, monkeypatch):
    """Else a resume would go on after a step that nobody has."""
    charges, go = durable_run(owner)

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save_checkpoint", full)
    with pytest.raises(OSError, match="no space"):
        go()
    assert [entry for entry in owner.odometer.entries() if entry["kind"] == PROGRESS] == []
    assert len(charges) == 1


def test_a_run_that_lost_its_checkpoint_is_paid_for_again(owner, monkeypatch):
    """Its steps were shown: drawing them anew under the same record would give two releases for one."""
    charges, go = durable_run(owner)
    save = checkpoint.save_checkpoint

    def once(run, uses, *rest):
        if uses == 2:
            raise KeyboardInterrupt
        save(run, uses, *rest)

    monkeypatch.setattr(checkpoint, "save_checkpoint", once)
    with pytest.raises(KeyboardInterrupt):
        go()
    charges[0]._lock.close()
    for path in charges[0].run.glob("checkpoint-*"):
        path.unlink()
    monkeypatch.setattr(checkpoint, "save_checkpoint", save)
    go()
    assert len(owner.odometer.opened()) == 2 and len(owner.odometer.events()) == 2
