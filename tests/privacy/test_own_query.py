"""A custom query reaches the images only through a charge."""

import json
import os
import traceback
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
import torch
from owners import Owner, owner_of

import sfumato
from sfumato.data.images import ImageSet
from sfumato.errors import BudgetError, ConfigError, DataError, SfumatoError
from sfumato.privacy.events import Mechanism
from sfumato.privacy.own_query import trial_images
from sfumato.settings.data import Data


@pytest.fixture
def owner(tmp_path, tmp_path_factory) -> Owner:
    """Return an owner of a fifth of the digits, because functions get images one by one."""
    prepared = tmp_path_factory.getbasetemp() / "prepared-fifth"
    return owner_of(Data(holdout_fraction=0.8), prepared, tmp_path)


def opened(owner, **more):
    words = {"name": "edges", "sigma": 50.0, "size_hint": 1500, "lifetime_epsilon": 10.0} | more
    return sfumato.open_charge(owner.state, owner.state.parent / "card.json", **words)


def brightness(images, labels):
    return images.mean(dim=(1, 2, 3))[:, None]


TRIALS = 5  # calls on images of random pixels, before the first drawn image


def test_the_charge_is_journalled_before_the_first_image(owner):
    journalled = []

    def rows(images, labels):
        journalled.append(len(owner.odometer.opened()))
        return brightness(images, labels)

    with opened(owner, uses=2, sample_rate=0.5) as charge:
        charge.sum(rows, size=100)
        (record,) = owner.odometer.opened()
        assert record == charge.record and record["stage"] == "edges"
        assert Mechanism.from_json(record["event"]) == Mechanism(
            noise_multiplier=50.0, sample_rate=0.5, uses=2
        )
    assert journalled[0] == 0 and {*journalled[TRIALS:]} == {1}
    with opened(owner) as charge:
        charge.sum(brightness)
    assert len(owner.odometer.opened()) == 2


def without_columns(images, labels):
    return images.mean(dim=(1, 2, 3))


MISTAKES = {
    "rows without columns": (without_columns, {}),
    "other rows in a batch": (lambda x, y: torch.ones(len(x), 1 + (len(x) > 1)), {}),
    "a failure": (lambda x, y: x.unknown, {}),
    "another bound": (brightness, {"max_norm": 0.5}),
    "no size": (brightness, {"size": 0}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_that_ends_the_block_costs_nothing(owner, mistake):
    rows, words = MISTAKES[mistake]
    with pytest.raises(SfumatoError), opened(owner) as charge:
        charge.sum(rows, **words)
    with opened(owner) as unused, pytest.raises(BudgetError, match="call `sum` first"):
        _ = unused.record
    for ended in (charge, unused):
        with pytest.raises(BudgetError, match="closed when its `with` block ends"):
            ended.sum(brightness)
    assert not owner.odometer.opened()


def test_the_lifetime_is_checked_again_at_the_first_sum(owner):
    with opened(owner, sigma=0.6) as charge, opened(owner, sigma=0.6) as other:
        charge.sum(brightness, size=100)
        with pytest.raises(BudgetError, match="would be exceeded"):
            other.sum(brightness, size=100)
    assert owner.odometer.opened() == [charge.record]


def test_a_forked_process_cannot_open_the_charge(owner):
    with opened(owner) as charge:
        child = os.fork()
        if not child:
            try:
                charge.sum(brightness)
            except BudgetError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    assert not owner.odometer.opened()


def test_the_block_may_change_the_current_folder(owner, tmp_path, monkeypatch):
    monkeypatch.chdir(owner.state.parent)
    words = {"name": "edges", "sigma": 50.0, "size_hint": 1500, "lifetime_epsilon": 10.0}
    with sfumato.open_charge(owner.state.name, "card.json", **words) as charge:
        monkeypatch.chdir("/")
        charge.sum(brightness, size=100)
    assert owner.odometer.opened() == [charge.record]


def test_numbers_of_numpy_are_numbers(owner):
    words = {"sigma": np.float32(50), "size_hint": np.int64(1500), "uses": np.int64(2)}
    words |= {"sample_rate": np.float32(0.5), "max_norm": np.float32(2), "delta": np.float64(1e-5)}
    with opened(owner, **words, lifetime_epsilon=np.float32(10)) as charge:
        charge.sum(brightness, np.float64(2), size=np.int64(100))
    assert json.loads(json.dumps(charge.record)) == charge.record
    with pytest.raises(BudgetError, match="uses"), opened(owner, uses=np.True_):
        raise AssertionError("opened")


def test_a_sum_is_of_bounded_rows_made_of_one_image_each(owner):
    seen = []

    def rows(images, labels):
        seen.append(len(images))
        return 1e6 * torch.ones(len(images), 1)

    with opened(owner, sigma=1.0, lifetime_epsilon="unlimited") as charge:
        total = charge.sum(rows)
    images = seen[TRIALS:]
    assert {*images} == {1} and abs(total.item() - len(images)) < 8  # standard deviations


def test_nothing_is_drawn_beyond_uses_or_lifetime(owner):
    with opened(owner) as charge:
        charge.sum(brightness)
        with pytest.raises(BudgetError, match="all uses of the charge are spent"):
            charge.sum(brightness)
    with opened(owner) as charge:
        pass
    with pytest.raises(BudgetError):
        charge.sum(brightness)
    with pytest.raises(BudgetError, match="lifetime_epsilon"), opened(owner, sigma=0.1):
        raise AssertionError("opened")
    with pytest.raises(BudgetError, match="max_norm"), opened(owner) as charge:
        charge.sum(brightness, max_norm=0.5)


@pytest.mark.parametrize("name", ["count", "two words"])
def test_a_name_is_none_of_a_stage(owner, name):
    with pytest.raises(ConfigError, match="name"), opened(owner, name=name):
        raise AssertionError("opened")
    assert not owner.odometer.opened()


def hidden(owner, **more):
    """Open a charge with so little noise that its releases are the sums."""
    return opened(owner, sigma=1e-6, lifetime_epsilon="unlimited", **more)


def raises(images, labels):
    raise KeyError("no image goes through this")


WRONG = {
    "eight rows per image": lambda x, y: torch.ones(8 * len(x), 8),
    "the images of a batch and their lines as one": lambda x, y: x.flatten(0, 1).flatten(0, 1),
    "a row for all": lambda x, y: torch.ones(1, 8) if len(x) > 1 else torch.ones(2, 8),
    "a row that broadcasts": lambda x, y: torch.ones(8),
    "a batch of matrices": lambda x, y: torch.ones(len(x), 64, 8),
    "one image without its batch": lambda x, y: x.squeeze().flatten(1),
    "fewer columns for one image": lambda x, y: torch.ones(len(x), 7 + (len(x) > 1)),
    "no columns": lambda x, y: torch.ones(len(x), 0),
    "complex numbers": lambda x, y: torch.ones(len(x), 8, dtype=torch.complex64),
    "a sparse matrix": lambda x, y: torch.ones(len(x), 8).to_sparse(),
    "nested tensors": lambda x, y: torch.nested.nested_tensor(
        [torch.ones(8)] * len(x), layout=torch.strided
    ),
    "no memory": lambda x, y: torch.ones(len(x), 8, device="meta"),
    "an array": lambda x, y: np.ones((len(x), 8)),
    "a list": lambda x, y: [[1.0]] * len(x),
    "nothing": lambda x, y: None,
    "rows of a query": lambda x, y: (torch.ones(len(x), 8), torch.ones(len(x), 8)),
    "an error": raises,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("wrong", WRONG)
def test_a_function_without_one_row_per_image_is_refused(owner, wrong):
    calls = []

    def watched(images, labels):
        calls.append(len(images))
        return WRONG[wrong](images, labels)

    with hidden(owner) as charge:
        for size in (1, 8):
            with pytest.raises(ConfigError, match="rows|the row of one image"):
                charge.sum(watched, size=size)
        assert len(calls) <= 8  # all of them trials on public noise
        assert charge.sum(brightness).shape == (1,)  # the use is still available


def seen_otherwise(rows):
    """Return a function that is `brightness` on public noise, and `rows` on drawn images.

    The first TRIALS calls get public noise.
    """
    calls = []

    def function(images, labels):
        calls.append(len(images))
        return brightness(images, labels) if len(calls) <= TRIALS else rows(images, labels)

    return function


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("wrong", [name for name in WRONG if name != "an error"])
@pytest.mark.parametrize("size", [1, 7])
def test_drawn_images_without_rows_add_nothing_in_silence(owner, wrong, size, capfd):
    with hidden(owner) as charge:
        total = charge.sum(seen_otherwise(WRONG[wrong]), size=size)
    assert total.shape == (1,) and abs(total.item()) < 1e-3
    said = capfd.readouterr()
    assert "rows" not in said.out + said.err


@pytest.mark.parametrize("count", [1, 8, 50])
def test_one_image_with_many_rows_moves_the_sum_by_at_most_one(owner, count):
    """The function returns `count` rows of norm 1 for one image, and one row for any other."""

    def rows(special):
        def function(images, labels):
            calls.append(0)
            first = torch.arange(len(images)) + len(calls) == special
            times = torch.where(first, count, 1)
            return torch.ones(len(images), 1).repeat_interleave(times, dim=0)

        return function

    sums = []
    for special in (-1, 20):
        calls = []
        with hidden(owner) as charge:
            sums.append(charge.sum(rows(special)).item())
    assert abs(sums[0] - sums[1]) <= 1 + 1e-3


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64]
)
def test_rows_of_any_real_type_are_summed(owner, dtype):
    with hidden(owner) as charge:
        total = charge.sum(
            lambda x, y: torch.ones(len(x), 1, requires_grad=True).to(dtype), size=64
        )
    assert total.item() > 250 and total.dtype == torch.float64 and not total.requires_grad


def test_rows_that_are_not_finite_are_left_out(owner):
    with hidden(owner) as charge:
        assert abs(charge.sum(lambda x, y: torch.full((len(x), 1), float("nan"))).item()) < 1e-3


class Remembering:
    """Functions whose row for an image depends on earlier calls."""

    def __init__(self) -> None:
        self.calls, self.mean, self.seen = 0, 0.0, set()
        self.generator = torch.Generator().manual_seed(0)

    def counted(self, images, labels):
        self.calls += 1
        return brightness(images, labels) + self.calls

    def centred(self, images, labels):
        row = brightness(images, labels)
        self.mean = 0.9 * self.mean + 0.1 * float(row.mean())
        return row - self.mean

    def buffered(self, images, labels):
        """Return a view of the buffer, which the next call changes."""
        self.buffer = getattr(self, "buffer", torch.zeros(1, 1))
        self.buffer.mul_(0.9).add_(brightness(images, labels).mean())
        return self.buffer.expand(len(images), 1)

    def once(self, images, labels):
        new = [image.numpy().tobytes() not in self.seen for image in images]
        self.seen |= {image.numpy().tobytes() for image in images}
        return torch.tensor(new)[:, None].double()

    def random(self, images, labels):
        return brightness(images, labels) * torch.rand(len(images), 1, generator=self.generator)

    def wider(self, images, labels):
        self.calls += 1
        return torch.ones(len(images), self.calls)


@pytest.mark.parametrize("name", ["counted", "centred", "buffered", "once", "random", "wider"])
@pytest.mark.parametrize("size", [1, 8])
def test_a_function_that_remembers_is_refused_with_no_use_lost(owner, name, size):
    with hidden(owner) as charge:
        with pytest.raises(
            ConfigError, match="two different rows for one image.*No use of the charge is lost"
        ):
            charge.sum(getattr(Remembering(), name), size=size)
        assert charge.sum(brightness, size=size).shape == (1,)


def test_a_function_may_change_its_own_arguments(owner):
    with hidden(owner) as charge:
        total = charge.sum(lambda x, y: x.mul_(0.5).mean(dim=(1, 2, 3))[:, None])
    with hidden(owner) as charge:
        assert total.item() == pytest.approx(charge.sum(brightness).item() / 2, rel=1e-3)


@pytest.mark.parametrize(
    "kind, labels", [("one", np.arange(6) % 2), ("several", np.ones((6, 2), np.uint8))]
)
def test_trials_have_the_form_of_the_set(owner, kind, labels):
    found = []
    card = replace(owner.card, classes=("even", "odd"), labels=kind)
    images = np.zeros((6, 8, 8, 1), np.uint8)
    for batch in (trial_images(card), ImageSet(images, labels, card.classes).batch(np.arange(4))):
        found.append([(part.shape, part.dtype) for part in batch])
        assert int(batch[1].max()) == 1
    assert found[0] == found[1]


def test_a_journal_without_a_charge_of_the_project_is_refused(owner):
    with opened(owner) as charge:
        charge.sum(brightness)
        record = charge.record
    kept = owner.state / "runs" / ("f" * 32) / "released"
    kept.mkdir(parents=True)
    (kept / "privacy.json").write_text(json.dumps({"records": [record | {"id": "f" * 32}]}))
    with pytest.raises(BudgetError, match="lacks"), opened(owner):
        raise AssertionError("opened")
    assert owner.odometer.opened() == [record]


def test_rows_that_are_not_numbers_twice_are_no_memory(owner):
    with hidden(owner) as charge:
        assert (
            abs(charge.sum(lambda x, y: torch.full((len(x), 2), float("nan"))).sum().item()) < 1e-3
        )


def test_opening_a_charge_states_what_it_does_not_cover():
    said = " ".join(sfumato.open_charge.__doc__.split())
    assert "if each row depends on one image only. A function with memory breaks this" in said


WHO = "the image of a patient"


class Refused(BaseException):
    """An exception like Ctrl-C."""


@pytest.mark.parametrize("kind", [KeyError, MemoryError, DataError, RuntimeError, Refused])
def test_a_failing_function_spends_one_use_in_silence(owner, kind):
    seen = []

    def fails(images, labels):
        seen.append(float(images.sum()))
        if len(seen) == 20:
            raise kind(f"{WHO} {seen[-1]}")
        return brightness(images, labels)

    with hidden(owner, uses=3) as charge:
        with pytest.raises(Refused if kind is Refused else DataError) as failure:
            charge.sum(fails)
        if kind is not Refused:
            text = "".join(traceback.format_exception(failure.value))
            assert "Other uses are not lost" in str(failure.value)
            assert f"{seen[-1]}" not in text and WHO not in text
        assert len(seen) == 20
        for _ in range(2):
            assert charge.sum(brightness).item() > 100
        with pytest.raises(BudgetError, match="all uses of the charge are spent"):
            charge.sum(brightness)
    (opened_once,) = owner.odometer.opened()
    assert Mechanism.from_json(opened_once["event"]).uses == 3


def test_what_is_left_of_a_draw_that_was_given_up_cannot_be_seen(owner):
    with hidden(owner, uses=3) as charge:
        charge.sum(brightness)
        left = charge._charge.batches(size=4)
        next(left)
        charge._charge.end_use()
        with pytest.raises(BudgetError, match="this draw has ended"):
            next(left)
        assert charge._charge.used == 2
        charge._charge.end_use()
        assert charge._charge.used == 2  # without a draw nothing is spent


@pytest.mark.parametrize("bound", [0, -1, 0.5, 2.0, float("nan"), float("inf"), "1", True, None])
def test_another_bound_than_the_charge_s_loses_no_use(owner, bound):
    with hidden(owner, max_norm=3.0) as charge:
        if bound is not None:
            with pytest.raises(BudgetError, match="max_norm"):
                charge.sum(brightness, bound)
        assert charge.sum(brightness).shape == (1,)


@pytest.mark.parametrize("size", [0, -1, 1.5, "8", None, True])
def test_a_size_that_is_no_number_of_images_loses_no_use(owner, size):
    with hidden(owner) as charge:
        with pytest.raises(ConfigError, match="size="):
            charge.sum(brightness, size=size)
        charge.sum(brightness)


def test_a_second_sum_at_the_same_time_loses_no_use(owner):
    def sum_within(images, labels):
        with pytest.raises(BudgetError, match="another `sum` of this charge is still running"):
            charge.sum(brightness)
        return brightness(images, labels)

    def sum_in_a_thread(images, labels):
        thread = Thread(target=sum_within, args=(images, labels))
        thread.start()
        thread.join()
        return brightness(images, labels)

    with opened(owner, uses=2) as charge:
        charge.sum(sum_within, size=100)
        charge.sum(sum_in_a_thread, size=100)


NO_NUMBERS = ("1", [], {}, float("nan"), -1, 0, float("inf"), 10**400, True)
HOSTILE = {
    "sigma": (*NO_NUMBERS[:-1], None, 1e-200, 1e200),
    "size_hint": (*NO_NUMBERS, None, 1, 2, 1500.0, 10.5),
    "uses": (*NO_NUMBERS, None, 1.5, 10**10),
    "sample_rate": (*NO_NUMBERS[:-1], None, 1.0001, 2),
    "max_norm": (*NO_NUMBERS, None, 1e-38, 1e38),
    "delta": (*NO_NUMBERS, 0.9, 1, 0.01, 7e-4),
    "lifetime_epsilon": (*NO_NUMBERS, None, "limitless"),
    "name": (5, None, [], {}, b"edges", "", " ", "a b", "../up", "count", "x" * 65, "a\0b"),
    "state": ("/dev/null", "/nowhere", "a\0b", ""),
    "card": ("/dev/zero", "/nowhere", "/", "a\0b", ""),
}


@pytest.mark.parametrize("key", HOSTILE)
def test_a_charge_of_hostile_words_is_refused_in_one_sentence(owner, here, key):
    words = {"name": "edges", "sigma": 50.0, "size_hint": 1500, "lifetime_epsilon": "unlimited"}
    words |= {"state": owner.state, "card": owner.state.parent / "card.json"}
    for value in HOSTILE[key]:
        with pytest.raises(SfumatoError) as refusal, sfumato.open_charge(**words | {key: value}):
            raise AssertionError(f"opened with {key}={str(value)[:20]}")
        assert ("\n" not in str(refusal.value) and key in str(refusal.value)) or key in (
            "state",
            "card",
            "sigma",
        )
        assert not owner.odometer.opened()
