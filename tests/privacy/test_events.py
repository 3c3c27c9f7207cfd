import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

from sfumato.errors import BudgetError
from sfumato.privacy.events import Mechanism

GAUSSIAN = {"type": "Gaussian", "noise_multiplier": 1}
TWICE = {"type": "SelfComposed", "count": 2, "event": GAUSSIAN}
NO_NOISE = 0, -1, 1e-200, 1e101, 1e155, float("nan")
NO_RATE = 0, 1.1, 1.5, 1e-320
SAMPLED = PoissonSampledDpEvent(0.3, GaussianDpEvent(2.5))


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        *(
            {"type": kind, "noise_multiplier": 1}
            for kind in ("Laplace", ["Gaussian"], {"Gaussian": 1})
        ),
        {"type": "Gaussian"},
        {"type": "Gaussian", "noise_multiplier": 1, "free": True},
        *(
            {"type": "Gaussian", "noise_multiplier": noise}
            for noise in (*NO_NOISE, float("inf"), "5", 1e-101, 1e308)
        ),
        *(
            {"type": "SelfComposed", "count": count, "event": GAUSSIAN}
            for count in (0, 10**9 + 1, True, 2.5)
        ),
        *(
            {"type": "PoissonSampled", "sampling_probability": q, "event": GAUSSIAN}
            for q in (*NO_RATE, 5e-324, 1e-101)
        ),
        {
            "type": "PoissonSampled",
            "sampling_probability": 0.5,
            "event": {"type": "Composed", "events": []},
        },
        {"type": "Composed", "events": [GAUSSIAN]},
        *(
            {"type": kind, "count": 2, "event": TWICE}
            for kind in ("SelfComposed", "PoissonSampled")
        ),
    ],
)
def test_anything_outside_the_closed_list_is_refused(data):
    with pytest.raises(BudgetError):
        Mechanism.from_json(data)


@pytest.mark.parametrize(
    "bad",
    [
        *({"noise_multiplier": noise} for noise in NO_NOISE),
        *({"noise_multiplier": 1, "sample_rate": rate} for rate in NO_RATE),
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
