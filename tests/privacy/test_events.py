import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

from sfumato.errors import BudgetError
from sfumato.privacy.events import Mechanism

GAUSSIAN = {"type": "Gaussian", "noise_multiplier": 1}
SAMPLED = PoissonSampledDpEvent(0.3, GaussianDpEvent(2.5))


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
        Mechanism.from_json(data)


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


@pytest.mark.parametrize(
    ("more", "event"),
    [
        ({}, GaussianDpEvent(2.5)),
        ({"uses": 7}, SelfComposedDpEvent(GaussianDpEvent(2.5), 7)),
        ({"sample_rate": 0.3}, SAMPLED),
        ({"sample_rate": 0.3, "uses": 7}, SelfComposedDpEvent(SAMPLED, 7)),
    ],
)
def test_a_mechanism_is_its_event_and_comes_back_from_its_record(more, event):
    mechanism = Mechanism(noise_multiplier=2.5, **more)
    assert mechanism.event == event and Mechanism.from_json(mechanism.to_json()) == mechanism
