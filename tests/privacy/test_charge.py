import copy
import dataclasses
import math
import os
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from sfumato.data.store import load_prepared
from sfumato.errors import BudgetError, ConfigError, DataError
from sfumato.privacy import authorize, sampling
from sfumato.privacy.accountant import epsilon
from sfumato.privacy.authorize import AlreadyReleasedError, open_local
from sfumato.privacy.charge import PROBES
from sfumato.privacy.events import SEEDED, Mechanism
from sfumato.privacy.noise import NoiseSource, public_grid
from sfumato.privacy.policy import SpendingPolicy
from sfumato.privacy.rows import Rows
from sfumato.queries.count import query_count
from sfumato.runtime import distributed

THREE = Mechanism(noise_multiplier=2.0, sample_rate=0.3, uses=3)


class Unreadable(np.ndarray):
    def __getitem__(self, index):
        assert not np.size(index), "pixels were read"
        return super().__getitem__(index)


def spend(charge):
    """Use up a charge, and close it."""
    while charge.used < charge.uses:
        draw(charge)
        charge.release(torch.zeros(3), max_norm=1.0)
    charge.close()


def draw(charge):
    return [images for images, _ in charge.batches(size=100)]


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


def test_batches_are_pieces_of_one_poisson_draw(owner):
    charge = owner.open(Mechanism(noise_multiplier=2.0, sample_rate=0.3, uses=40))
    size = len(load_prepared(owner.state, owner.card, "sensitive"))
    lengths = []
    for _ in range(40):
        pieces = draw(charge)
        assert all(len(piece) <= 100 for piece in pieces)
        lengths.append(sum(len(piece) for piece in pieces))
        charge.release(torch.zeros(1), 1.0)
    # The mean of 40 binomials is within six standard errors. Batches of a fixed size would all have
    # the same length.
    assert abs(sum(lengths) / 40 - 0.3 * size) < 6 * (0.21 * size / 40) ** 0.5
    assert len(set(lengths)) > 3


@pytest.mark.parametrize("segment", [100, sampling.SEGMENT])
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_a_draw_gives_no_image_twice_and_at_rate_one_every_image(owner, rate, segment, monkeypatch):
    monkeypatch.setattr(sampling, "SEGMENT", segment)
    images = load_prepared(owner.state, owner.card, "sensitive")
    charge = owner.open(Mechanism(noise_multiplier=2.0, sample_rate=rate))
    charge._images = replace(images, images=images.images.copy(), labels=np.arange(len(images)))
    pixels, seen = (torch.cat(parts) for parts in zip(*charge.batches(size=64), strict=True))
    assert len(seen.unique()) == len(seen) == len(pixels) and (rate < 1 or len(seen) == len(images))
    assert pixels.dtype == torch.float32 and pixels.min() >= 0 and pixels.max() <= 1


def test_what_is_left_of_a_draw_cannot_be_seen_after_its_release(owner):
    charge = owner.open(THREE)
    left = charge.batches(size=10)
    next(left)
    charge.release(torch.zeros(1), 1.0)
    with pytest.raises(BudgetError, match="this draw has ended"):
        next(left)
    left = charge.batches(size=10)
    charge.release(torch.zeros(1), 1.0)
    draw(charge)
    with pytest.raises(BudgetError, match="this draw has ended"):
        next(left)


def test_counting_reads_no_pixel(owner):
    charge = owner.open(Mechanism(noise_multiplier=1e-9))
    labels = charge._images.labels
    charge._images = replace(charge._images, images=charge._images.images.view(Unreadable))
    with pytest.raises(AssertionError, match="pixels"):
        charge._images.batch(np.arange(3))
    assert query_count(charge, 10).tolist() == np.bincount(labels, minlength=10).tolist()


def test_release_adds_noise_of_multiplier_times_bound(owner):
    charge = owner.open(Mechanism(noise_multiplier=2.5), max_norm=3.0)
    draw(charge)
    total = torch.full((400_000,), 7.0)
    noise = charge.release(total, max_norm=3.0) - total
    # The sample variance has a standard error of σ²√(2/n), and deviates by six of them with
    # probability 2e-9
    assert abs(noise.double().var().item() / 7.5**2 - 1) < 6 * (2 / 400_000) ** 0.5


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf"), 1e-320, 1e-30])
def test_a_bound_that_gives_no_noise_or_all_is_refused(owner, bound):
    charge = owner.open()
    draw(charge)
    with pytest.raises(BudgetError, match="max_norm"):
        charge.release(torch.zeros(1), bound)


def released_values(owner, total: float, integer: bool, count: int = 20_000) -> np.ndarray:
    """Release a vector of `count` entries, all equal to `total`. Returns the vector, float64."""
    charge = owner.open(Mechanism(noise_multiplier=3.0), plan=f"{total}")
    draw(charge)
    return charge.release(
        torch.full((count,), total, dtype=torch.float64), 1.0, integer=integer
    ).numpy()


def test_the_last_bits_of_a_count_tell_nothing(owner):
    """Without rounding, one in fourteen outcomes of 0 plus noise has bits below 2⁻⁵³.

    No outcome of 1 plus noise has such bits.
    """
    raw = np.random.default_rng(0).standard_normal(20_000) * 3
    bits = [
        np.mean((values != 0) & (np.abs(values) < 0.5) & (values * 2.0**53 % 1 != 0))
        for values in (raw, raw + 1)
    ]
    assert bits[0] > 0.02 and bits[1] == 0  # the attack succeeds on unrounded sums
    empty, one = (released_values(owner, total, integer=True) for total in (0.0, 1.0))
    assert np.array_equal(empty, np.rint(empty)) and np.array_equal(one, np.rint(one))
    # Both totals have the same outcomes
    assert set(range(-6, 8)) <= set(empty.astype(int)) & set(one.astype(int))


def test_the_last_bits_of_a_sum_tell_nothing(owner):
    grid = public_grid(3.0)
    for total in (0.0, 0.3, 1 / 3, 1e-9):
        values = released_values(owner, total, integer=False)
        assert np.array_equal(values, np.rint(values / grid) * grid)
    assert grid < 1e-5 * 3.0  # rounding is negligible beside the noise
    # The grid is a power of two, and the same for similar bounds
    assert public_grid(3.0) == public_grid(3.9) and np.log2(grid) == int(np.log2(grid))


def test_each_draw_is_dealt_to_the_processes_anew(owner, monkeypatch):
    """A process reads only the images that are assigned to it.

    False alarms: both draws get the same assignment with a probability below 2^-1000. This process
    gets too many or too few images with a probability below 1e-8.
    """
    for name, value in {"world_size": 2, "rank": 0}.items():
        monkeypatch.setattr(distributed, name, lambda value=value: value)
    for name in ("broadcast_object", "broadcast", "reduce_sum"):
        monkeypatch.setattr(distributed, name, lambda given: given)
    charge = owner.open(Mechanism(noise_multiplier=2.0, uses=2))
    seen = []
    for _ in range(2):
        seen.append(torch.cat([images.flatten(1) for images in draw(charge)]))
        charge.release(torch.zeros(1), max_norm=1.0)
    size = len(load_prepared(owner.state, owner.card, "sensitive"))
    assert all(abs(len(rows) - size / 2) < 3 * math.sqrt(size) for rows in seen)
    assert seen[0].shape != seen[1].shape or not torch.equal(*seen)


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_nothing_is_drawn_or_released_after_the_end(owner, end):
    charge = owner.open(THREE)
    draw(charge)
    getattr(charge, end)()
    with pytest.raises(BudgetError, match="closed"):
        charge.release(torch.zeros(1), 1.0)
    with pytest.raises(BudgetError, match="new charge"):
        draw(charge)


@pytest.mark.parametrize("attempt", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_charge_cannot_be_copied(owner, attempt):
    with pytest.raises(TypeError, match="copied"):
        attempt(owner.open())


def test_a_fork_cannot_use_the_charge_of_its_parent(owner):
    charge = owner.open(Mechanism(noise_multiplier=2.0, uses=2))
    draw(charge)
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (lambda: charge.release(torch.zeros(1), 1.0), lambda: charge.batches(8)):
            try:
                use()
            except BudgetError as error:
                refused += "another process" in str(error)
        os._exit(10 + refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 12
    charge.release(torch.zeros(1), 1.0)
    assert charge.used == 1


def test_a_resume_with_another_mechanism_is_refused(owner):
    """If another mechanism were accepted, a caller could add less noise, or draw at a larger rate,
    and would only be charged for the record's mechanism.
    """
    charge = owner.open(THREE)
    draw(charge), charge.release(torch.zeros(1), 1.0)
    charge.durable()
    charge._lock.close()
    for other in (
        replace(THREE, noise_multiplier=0.1),
        replace(THREE, sample_rate=1.0),
        replace(THREE, uses=9),
    ):
        with pytest.raises(BudgetError, match="another mechanism"):
            owner.open(other)
    zero_out = SpendingPolicy(delta=1e-5, lifetime_epsilon="unlimited", declared_size=True)
    for more in ({"max_norm": 9.0}, {"permission": zero_out}):
        with pytest.raises(BudgetError, match="another mechanism"):
            owner.open(THREE, **more)
    resumed = owner.open(THREE)
    assert resumed.record == charge.record | {"id": resumed.record["id"]}
    assert resumed.noise_multiplier == 2.0 and resumed.used == 1


@pytest.mark.parametrize("bound", [1.0, 2**0.5, 1e-3 / 3])
def test_a_sum_of_another_bound_than_the_record_s_is_refused(owner, bound):
    charge = owner.open(max_norm=bound)
    assert charge.record["max_norm"] == bound
    draw(charge)
    for other in (0.5, 1.05, 1.5):
        with pytest.raises(BudgetError, match="max_norm=.*use the bound of the charge"):
            charge.release(torch.zeros(1), other * bound)
    charge.release(torch.zeros(1), bound)


def test_a_killed_query_restarts_with_fresh_noise_for_free(owner):
    released = []
    for _ in range(2):
        charge = owner.open(THREE)
        assert charge.used == 0
        draw(charge)
        released.append(charge.release(torch.zeros(32), 1.0))
        charge._lock.close()
    assert not torch.equal(*released)
    resumed = owner.open(THREE)
    assert resumed.record == charge.record | {"id": resumed.record["id"]}
    spend(resumed)
    assert len(owner.odometer.opened()) == 1


@pytest.mark.parametrize("claims", [(True, False), (False, True)])
def test_a_resumed_charge_has_the_claim_of_today(owner, claims):
    for claim in claims:
        permission = SpendingPolicy(delta=1e-5, lifetime_epsilon="unlimited", one_image_each=claim)
        charge = owner.open(THREE, permission=permission)
        charge._lock.close()
        assert ("claim" in charge.record) == claim
    assert len(owner.odometer.opened()) == 1


def test_no_charge_is_opened_on_images_replaced_meanwhile(owner, monkeypatch):
    def replaced(*arguments):
        file = owner.state / "data" / owner.card.dataset_id / "fingerprint"
        file.write_text("0" * len(file.read_text()))
        return images_of(*arguments)

    images_of = authorize.images_of
    monkeypatch.setattr("sfumato.privacy.authorize.images_of", replaced)
    with pytest.raises(DataError, match="replaced the prepared images"):
        owner.open(THREE)
    assert owner.odometer.opened() == []


def test_the_same_work_is_refused_once_it_was_released(owner):
    charge = owner.open()
    spend(charge)
    with pytest.raises(
        BudgetError, match=f"already released as {charge.record['id']}.*spend_again"
    ):
        owner.open()
    owner.open(plan="another plan")
    with pytest.raises(
        AlreadyReleasedError, match=f"already released as {charge.record['id']}"
    ) as refusal:
        # A free stage that is recreated because a cache was lost is no reason to spend
        owner.open(inputs=["another input"])
    assert refusal.value.problem  # nothing made from other inputs is restored
    with pytest.raises(BudgetError, match="already released"):
        # The same settings and inputs, in another plan
        owner.open(plan="newer", settings="plan")
    again = owner.open(again=1)
    assert again.record["id"] != charge.record["id"]
    assert len(owner.odometer.opened()) == 3
    spend(again)
    with pytest.raises(BudgetError, match=f"already released as {again.record['id']}"):
        owner.open(again=1)


def test_a_killed_run_is_continued_at_its_last_durable_use(owner):
    charge = owner.open(THREE)
    draw(charge), charge.release(torch.zeros(1), 1.0)
    charge.durable()
    draw(charge), charge.release(torch.zeros(1), 1.0)  # not durable, so lost with the process
    charge._lock.close()
    resumed = owner.open(THREE)
    assert resumed.record == charge.record | {"id": resumed.record["id"]} and resumed.used == 1
    # The id is new, because a copy of the state may resume from the same step
    assert resumed.record["id"] != charge.record["id"]
    assert owner.odometer.opened() == [resumed.record]
    spend(resumed)
    with pytest.raises(BudgetError, match="already released"):
        owner.open(THREE)


def test_an_open_run_of_the_same_plan_is_not_paid_again(owner):
    """Two clones have the same plan, but `pretrain` wrote different bytes in each clone.

    So the inputs of the query have different digests.
    """
    held = owner.open(THREE, inputs=["one"])
    for inputs in ("one", "two"):
        with pytest.raises(BudgetError, match="locked by another process"):
            owner.open(THREE, inputs=[inputs])
    assert held.used == 0
    held._lock.close()  # a kill, after which the free stage runs again
    with pytest.raises(
        BudgetError,
        match="with different inputs.*Restore the old artifacts.*spend_again: {count: 1}",
    ):
        owner.open(THREE, inputs=["two"])
    assert len(owner.odometer.opened()) == 1
    again = owner.open(THREE, inputs=["two"], again=1)  # a new charge was requested
    again.abandon()
    resumed = owner.open(THREE, inputs=["one"])
    assert resumed.run == held.run and len(owner.odometer.opened()) == 2


def test_a_run_given_up_stays_spent_and_the_next_is_a_new_charge(owner):
    charge = owner.open(THREE)
    charge.abandon()
    fresh = owner.open(THREE)
    assert fresh.record["id"] != charge.record["id"] and fresh.used == 0
    assert len(owner.odometer.opened()) == 2


def test_other_images_are_other_work(owner):
    spend(owner.open())
    other = dataclasses.replace(owner.card, version="another")
    assert owner.odometer.charges(other.version) == []
    with pytest.raises(DataError, match="prepare"):
        dataclasses.replace(owner, card=other).open()


def test_a_charge_over_the_lifetime_is_refused_with_ways_out(owner):
    def third(limit: float, plan: str = "third") -> None:
        owner.open(plan=plan, permission=SpendingPolicy(delta=1e-5, lifetime_epsilon=limit))

    owner.open(plan="first")
    owner.open(THREE, plan="second", stage="central")
    one = epsilon([Mechanism(noise_multiplier=2.0).event], 1e-5)
    with pytest.raises(BudgetError, match="lifetime_epsilon") as refusal:
        third(one)
    words = str(refusal.value)
    assert (
        f"count {one:.3g} (1 ×)" in words
        and "central " in words
        and f"the next run (count {one:.3g})" in words
    )
    assert "Keep the old release, if this project has one" in words
    assert "raise privacy.lifetime_epsilon to" in words
    assert "smaller privacy.epsilon" not in words, (
        "the limit is exceeded already: no plan is small enough"
    )
    assert len(owner.odometer.opened()) == 2
    raised = float(re.search(r"lifetime_epsilon to ([\d.]+)", words)[1])
    third(raised)  # the suggested budget is enough
    with pytest.raises(BudgetError, match="for this plan .*, if it is not set yet"):
        third(1.05 * raised, "fourth")


@pytest.mark.parametrize("limit", [None, 0, -1.0, "none", float("nan"), True])
def test_a_lifetime_that_is_no_number_never_means_unlimited(limit):
    with pytest.raises(BudgetError, match="lifetime_epsilon"):
        SpendingPolicy(delta=1e-5, lifetime_epsilon=limit)


@pytest.mark.parametrize("delta", [0.0, 0.5, float("nan")])
def test_a_delta_that_guarantees_little_is_refused(delta):
    with pytest.raises(BudgetError, match=f"delta={delta:g} is not allowed"):
        SpendingPolicy(delta=delta, lifetime_epsilon=1.0)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_the_order_of_opening_changes_no_bit_of_the_total(accountant):
    events = [Mechanism(noise_multiplier=s, sample_rate=0.3, uses=3).event for s in (1.1, 2.3, 0.9)]
    assert epsilon(events, 1e-5, accountant) == epsilon(events[::-1], 1e-5, accountant)


def test_seeded_noise_is_stamped_on_the_record(owner):
    assert owner.open(noise=NoiseSource(seed=0)).record["noise_source"] == SEEDED


def test_the_local_door_is_journalled(owner):
    sensitive, holdout = open_local(owner.state, owner.card, "evaluate")
    assert len(sensitive) > len(holdout) > 0
    assert [entry["purpose"] for entry in owner.odometer.entries() if entry["kind"] == "local"] == [
        "evaluate"
    ]
    assert owner.odometer.opened() == []


def test_missing_images_are_named(owner, tmp_path):
    with pytest.raises(DataError, match="SFUMATO_STATE"):
        open_local(tmp_path / "elsewhere", owner.card, "evaluate")


def test_the_charge_itself_bounds_and_drops_rows(owner):
    """The query does not clip: its rows are scaled by 1000, and one per batch is not finite."""
    charge = owner.open(Mechanism(noise_multiplier=1e-3), max_norm=0.5)
    images = len(load_prepared(owner.state, owner.card, "sensitive"))
    batches = []

    def careless(images, labels):
        batches.append(len(images))
        rows = 1000 * images.flatten(1)
        rows[:1] = float("nan")
        return Rows(rows)

    total = charge.sum(careless, 0.5, size=100)
    assert total.shape == (64,) and total.isfinite().all() and charge.used == 1
    assert max(batches) <= 100 and sum(batches) == images + 1 + PROBES
    assert 0.3 * images < total.norm() <= 0.5 * images + 1


def test_rows_that_depend_on_the_batch_are_refused_without_a_use(owner):
    charge = owner.open()

    def rows_of(images, labels):
        return Rows(images.flatten(1)[:, : len(images)])

    with pytest.raises(ConfigError, match="changes with the number of images"):
        charge.sum(rows_of, 1.0, size=100)
    assert charge.used == 0


def test_an_exact_lifetime_counts_charges_of_older_projects(owner):
    """Records contain mechanisms, not ε. So charges that were planned by Rényi's bound can be
    composed exactly with new charges.
    """
    owner.open(plan="first", permission=SpendingPolicy(delta=1e-5, lifetime_epsilon=99.0))
    both = [Mechanism(noise_multiplier=2.0).event] * 2
    exact, renyi = (epsilon(both, 1e-5, name) for name in ("exact", "rdp"))

    def second(limit: float, accountant: str) -> None:
        owner.open(
            plan="second",
            permission=SpendingPolicy(delta=1e-5, lifetime_epsilon=limit, accountant=accountant),
        )

    with pytest.raises(BudgetError, match="would raise the total to"):
        second(exact - 1e-6, "exact")
    with pytest.raises(BudgetError, match="would raise the total to"):
        second(renyi - 1e-6, "rdp")  # an older project still counts by Rényi's bound
    second(exact + 1e-6, "exact")
    assert owner.odometer.events() == both
