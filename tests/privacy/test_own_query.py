"""A query of one's own: no path to the images without a charge."""

import pytest
import torch

import sfumato
from sfumato.errors import BudgetError, ConfigError
from sfumato.privacy.events import Mechanism


def opened(owner, **more):
    words = {"name": "edges", "sigma": 50.0, "size_hint": 1500, "lifetime_epsilon": 10.0} | more
    return sfumato.open_charge(owner.state, owner.state.parent / "card.json", **words)


def brightness(images, labels):
    return images.mean(dim=(1, 2, 3))[:, None]


def test_the_charge_is_journalled_before_the_first_image_and_each_call_is_another(owner):
    with opened(owner, uses=2, sample_rate=0.5) as charge:
        (record,) = owner.odometer.opened()
        assert record == charge.record and record["stage"] == "edges"
        assert Mechanism.from_json(record["event"]) == Mechanism(noise_multiplier=50.0, sample_rate=0.5, uses=2)
    with opened(owner):
        pass
    assert len(owner.odometer.opened()) == 2


def test_a_sum_is_of_bounded_rows_made_of_one_image_each(owner):
    seen = []

    def rows(images, labels):
        seen.append(len(images))
        return 1e6 * torch.ones(len(images), 1)

    with opened(owner, sigma=1.0, lifetime_epsilon="unlimited") as charge:
        total = charge.sum(rows)
    _, *images = seen  # the first call is a trial on public noise
    assert {*images} == {1} and abs(total.item() - len(images)) < 8  # deviations


def test_nothing_is_seen_beyond_the_uses_after_the_end_or_over_the_lifetime(owner):
    with opened(owner) as charge:
        charge.sum(brightness)
        with pytest.raises(BudgetError, match="all are used"):
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
