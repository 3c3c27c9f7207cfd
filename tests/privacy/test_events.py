import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, LaplaceDpEvent, SelfComposedDpEvent

from sfumato.errors import BudgetError
from sfumato.privacy.events import Mechanism, event_from_json, event_to_json, mechanisms

GAUSSIAN = {"type": "Gaussian", "noise_multiplier": 1}


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"type": "Laplace", "noise_multiplier": 1},
        {"type": "Gaussian"},
        {"type": "Gaussian", "noise_multiplier": 0},
        {"type": "Gaussian", "noise_multiplier": float("nan")},
        {"type": "Gaussian", "noise_multiplier": float("inf")},
        {"type": "Gaussian", "noise_multiplier": "5"},
        {"type": "Gaussian", "noise_multiplier": 1, "free": True},
        {"type": "SelfComposed", "count": 0, "event": GAUSSIAN},
        {"type": "SelfComposed", "count": 10**9 + 1, "event": GAUSSIAN},
        {"type": "SelfComposed", "count": True, "event": GAUSSIAN},
        {"type": "SelfComposed", "count": 2.5, "event": GAUSSIAN},
        {"type": "PoissonSampled", "sampling_probability": 1.5, "event": GAUSSIAN},
        {"type": "PoissonSampled", "sampling_probability": 0.5, "event": {"type": "Composed", "events": []}},
        {"type": "Composed", "events": [GAUSSIAN]},
        {"type": ["Gaussian"], "noise_multiplier": 1},
        *(
            {"type": kind, "count": 2, "event": {"type": "SelfComposed", "count": 2, "event": GAUSSIAN}}
            for kind in ("SelfComposed", "PoissonSampled")
        ),
        {"type": {"Gaussian": 1}, "noise_multiplier": 1},
        *({"type": "Gaussian", "noise_multiplier": noise} for noise in (1e-200, 1e-101, 1e101, 1e155, 1e308)),
        *({"type": "PoissonSampled", "sampling_probability": q, "event": GAUSSIAN} for q in (5e-324, 1e-320, 1e-101)),
    ],
)
def test_anything_outside_the_closed_list_is_refused(data):
    with pytest.raises(BudgetError):
        event_from_json(data)


def test_an_event_of_another_type_cannot_be_written():
    with pytest.raises(BudgetError, match="Laplace"):
        event_to_json(LaplaceDpEvent(1.0))


@pytest.mark.parametrize(
    "bad",
    [
        {"noise_multiplier": 0},
        {"noise_multiplier": -1},
        {"noise_multiplier": 1e-200},
        {"noise_multiplier": 1e155},
        {"noise_multiplier": float("nan")},
        {"noise_multiplier": 1, "sample_rate": 1e-320},
        {"noise_multiplier": 1, "sample_rate": 1.1},
        {"noise_multiplier": 1, "sample_rate": 0},
        {"noise_multiplier": 1, "uses": 0},
    ],
)
def test_a_mechanism_without_a_guarantee_is_refused(bad):
    with pytest.raises(BudgetError):
        Mechanism(**bad)


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("uses", [1, 7])
def test_a_mechanism_comes_back_from_its_record(rate, uses):
    mechanism = Mechanism(noise_multiplier=2.5, sample_rate=rate, uses=uses)
    assert Mechanism.from_event(event_from_json(event_to_json(mechanism.event))) == mechanism
    with pytest.raises(BudgetError, match="not the event of one mechanism"):
        Mechanism.from_event(ComposedDpEvent([mechanism.event]))


def test_mechanisms_are_read_through_their_nesting():
    dpsgd = Mechanism(noise_multiplier=1.5, sample_rate=0.25, uses=2000).event
    both = ComposedDpEvent([dpsgd, GaussianDpEvent(5.0)])
    assert mechanisms(both) == [(1.5, 0.25, 2000), (5.0, 1.0, 1)]
    assert mechanisms(SelfComposedDpEvent(both, 3)) == [(1.5, 0.25, 6000), (5.0, 1.0, 3)]
    with pytest.raises(BudgetError, match="Laplace"):
        mechanisms(ComposedDpEvent([LaplaceDpEvent(1.0)]))
