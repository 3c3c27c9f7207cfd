import dataclasses
import pickle

import pytest
import torch

from sfumato.data.store import load_prepared
from sfumato.errors import BudgetError, DataError
from sfumato.privacy.accountant import epsilon
from sfumato.privacy.events import SEEDED, Mechanism, event_from_json
from sfumato.privacy.noise import NoiseSource
from sfumato.privacy.opening import Permission, open_local

THREE = Mechanism(noise_multiplier=2.0, sample_rate=0.3, uses=3)


def spend(charge):
    """Use a charge up, and close it."""
    while charge.used < charge.uses:
        draw(charge)
        charge.release(torch.zeros(3), max_norm=1.0)
    charge.close()


def draw(charge):
    return [images for images, _ in charge.batches(size=100)]


def test_the_journal_holds_the_whole_charge_before_the_first_batch(owner):
    charge = owner.open(THREE)
    (record,) = owner.odometer.opened()
    assert event_from_json(record["event"]) == THREE.event and record == charge.record


def test_one_draw_one_release_and_no_use_beyond_the_last(owner):
    charge = owner.open(THREE)
    with pytest.raises(BudgetError, match="nothing was drawn"):
        charge.release(torch.zeros(1), 1.0)
    for _ in range(3):
        draw(charge)
        with pytest.raises(BudgetError, match="not released"):
            draw(charge)
        charge.release(torch.zeros(1), 1.0)
        with pytest.raises(BudgetError, match="nothing was drawn"):
            charge.release(torch.zeros(1), 1.0)
    with pytest.raises(BudgetError, match="new charge"):
        draw(charge)


def test_a_closed_charge_draws_nothing(owner):
    charge = owner.open(THREE)
    charge.close()
    with pytest.raises(BudgetError):
        draw(charge)


def test_batches_are_pieces_of_one_poisson_draw(owner):
    charge = owner.open(Mechanism(noise_multiplier=2.0, sample_rate=0.3, uses=40))
    size = len(load_prepared(owner.state, owner.card, "sensitive"))
    lengths = []
    for _ in range(40):
        pieces = draw(charge)
        assert all(len(piece) <= 100 for piece in pieces)
        lengths.append(sum(len(piece) for piece in pieces))
        charge.release(torch.zeros(1), 1.0)
    # mean of 40 binomials within six standard errors; a fixed-size batch would give one length only
    assert abs(sum(lengths) / 40 - 0.3 * size) < 6 * (0.21 * size / 40) ** 0.5
    assert len(set(lengths)) > 3


def test_rate_one_gives_every_image_once(owner):
    images = torch.cat(draw(owner.open()))
    assert len(images) == len(load_prepared(owner.state, owner.card, "sensitive"))
    assert images.dtype == torch.float32 and images.min() >= 0 and images.max() <= 1


def test_release_adds_noise_of_multiplier_times_bound(owner):
    charge = owner.open(Mechanism(noise_multiplier=2.5))
    draw(charge)
    total = torch.full((400_000,), 7.0)
    noise = charge.release(total, max_norm=3.0) - total
    # s² has a standard error of σ²√(2/n): six of them, false alarm 2e-9
    assert abs(noise.double().var().item() / 7.5**2 - 1) < 6 * (2 / 400_000) ** 0.5


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bound_that_gives_no_noise_or_all_is_refused(owner, bound):
    charge = owner.open()
    draw(charge)
    with pytest.raises(BudgetError, match="max_norm"):
        charge.release(torch.zeros(1), bound)


def test_the_same_work_is_refused_once_it_was_released(owner):
    charge = owner.open()
    spend(charge)
    with pytest.raises(BudgetError, match=f"already released as {charge.record['id']}.*spend_again"):
        owner.open()
    owner.open(plan="another plan")
    owner.open(inputs=["another input"])
    again = owner.open(permission=Permission(delta=1e-5, spend_again=True))
    assert again.record["id"] != charge.record["id"]
    assert len(owner.odometer.opened()) == 4


def test_an_abort_never_lowers_what_was_opened(owner):
    for _ in range(2):
        charge = owner.open(THREE)
        charge._lock.close()  # as a kill would let go of it
    assert len(owner.odometer.opened()) == 2


def test_a_killed_run_is_continued_at_its_last_durable_use(owner):
    charge = owner.open(THREE, resumable=True)
    draw(charge), charge.release(torch.zeros(1), 1.0)
    charge.durable()
    draw(charge), charge.release(torch.zeros(1), 1.0)  # not durable: lost with the process
    charge._lock.close()
    resumed = owner.open(THREE, resumable=True)
    assert resumed.record == charge.record and resumed.used == 1
    assert len(owner.odometer.opened()) == 1
    spend(resumed)
    with pytest.raises(BudgetError, match="already released"):
        owner.open(THREE, resumable=True)


def test_resuming_draws_fresh_noise(owner):
    released = []
    for _ in range(2):
        charge = owner.open(THREE, resumable=True)
        draw(charge)
        released.append(charge.release(torch.zeros(32), 1.0))
        charge._lock.close()
    assert not torch.equal(*released)


def test_a_run_in_use_cannot_be_resumed_by_another_process(owner):
    held = owner.open(THREE, resumable=True)
    with pytest.raises(BudgetError, match="held by another process"):
        owner.open(THREE, resumable=True)
    assert held.used == 0


def test_a_run_given_up_stays_spent_and_the_next_is_a_new_charge(owner):
    charge = owner.open(THREE, resumable=True)
    charge.abandon()
    fresh = owner.open(THREE, resumable=True)
    assert fresh.record["id"] != charge.record["id"] and fresh.used == 0
    assert len(owner.odometer.opened()) == 2


def test_other_images_are_other_work(owner):
    spend(owner.open())
    other = dataclasses.replace(owner.card, fingerprint="0" * 64)
    assert owner.odometer.closed(other.fingerprint) is None
    with pytest.raises(DataError, match="prepare"):
        dataclasses.replace(owner, card=other).open()


def test_the_lifetime_budget_counts_everything_ever_opened(owner):
    one = epsilon([Mechanism(noise_multiplier=2.0).event], 1e-5)
    permission = Permission(delta=1e-5, lifetime_epsilon=1.2 * one)
    owner.open(permission=permission, plan="first")
    with pytest.raises(BudgetError, match="lifetime_epsilon"):
        owner.open(permission=permission, plan="second")
    assert len(owner.odometer.opened()) == 1


def test_seeded_noise_is_stamped_on_the_record(owner):
    assert owner.open(noise=NoiseSource(seed=0)).record["noise_source"] == SEEDED


def test_a_charge_cannot_be_copied(owner):
    with pytest.raises(TypeError):
        pickle.dumps(owner.open())


def test_the_local_door_is_journalled(owner):
    sensitive, holdout = open_local(owner.state, owner.card, "evaluate")
    assert len(sensitive) > len(holdout) > 0
    assert [entry["purpose"] for entry in owner.odometer.entries() if entry["kind"] == "local"] == ["evaluate"]
    assert owner.odometer.opened() == []


def test_missing_images_are_named(owner, tmp_path):
    with pytest.raises(DataError, match="SFUMATO_STATE"):
        open_local(tmp_path / "elsewhere", owner.card, "evaluate")
