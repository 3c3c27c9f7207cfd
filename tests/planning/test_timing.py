"""Expected times: measured once on blanks, in proportion to the work, without a look at the images."""

import json
from pathlib import Path

import pytest

from sfumato.planning import estimate
from sfumato.planning.clock import TIMINGS, Timings
from sfumato.planning.estimate import FRAME, IDLE, UNTIMED, Blanks, expected_seconds
from sfumato.settings.recipes import params_of
from sfumato.settings.stages import STAGES

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "recipe": "teacher-generator",
    "profile": None,
    "data": {"dataset_id": "set", "source": "imagefolder", "path": "/nowhere"},
    "privacy": {"epsilon": 1.0, "size_hint": 500},
    "frequency": {"size": 100},
    "embedding": {"size": 100, "learned": {"width": 8, "batch": 16, "dimension": 16}},
    "auxiliary": {"width": 8, "batch": 20, "images": 100},
    "refine": {"batch": 20, "images": 100},
    "teacher": {"dimension": 16},
    "synthesize": {"count": 100},
    "evaluate": {"classifiers": ["lr"], "seeds": [0], "steps": 10},
}


def expected(timings, recipes=ROOT / "pipelines", **changes):
    own = {**SMALL, **changes}
    return expected_seconds(params_of(own, Path("params.yaml"), recipes), (1, 8, 8), 3, timings, public_images=200)


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


def test_every_stage_has_a_time_and_one_that_is_off_hardly_any(state):
    found = expected(Timings(state))
    assert set(found) == {*STAGES, *FRAME}
    assert {name for name in STAGES if not callable(getattr(Blanks, name, None))} == {"count", *UNTIMED}
    assert found["pretrain"] == found["histogram"] == IDLE
    assert all(found[name] > 0 for name in ("count", "auxiliary", "teacher", "embedding", "refine", "evaluate"))


def test_what_was_measured_is_remembered_and_more_work_takes_longer_in_proportion(state, monkeypatch):
    first = expected(Timings(state))
    monkeypatch.setattr(estimate, "seconds_of", None)  # nothing is measured again
    monkeypatch.setattr(estimate, "seconds_of_steps", None)
    again = Timings(state)
    assert expected(again) == first
    one, twice, thrice = (
        expected(again, auxiliary={**SMALL["auxiliary"], "steps": 600 * times})["auxiliary"] for times in (1, 2, 3)
    )
    assert one == first["auxiliary"] and thrice - twice == pytest.approx(twice - one) and twice > one
    assert expected(again, privacy={"epsilon": 1.0, "size_hint": 5000})["frequency"] > first["frequency"]


def test_the_other_networks_are_timed_too(tmp_path):
    run = ["count", "central", "classifier", "histogram", "select", "pretrain", "saliency", "finetune", "synthesize"]
    model = {"width": 8, "multipliers": [1], "attention": [], "unshuffle": 1}
    changes = {"recipe": "sapf-pixel", "run": run, "model": model, "classifier": {"width": 8, "batch": 16}}
    changes |= {"finetune": {"steps": 5, "batch": 50, "draws": 1}, "embedding": {}, "teacher": {}}
    changes["synthesize"] = {"count": 20, "steps": 3}
    found = expected(Timings(tmp_path), **changes)
    start = found["plan"]
    assert all(
        found[name] > start for name in ("central", "classifier", "histogram", "pretrain", "saliency", "finetune")
    )
    assert (tmp_path / TIMINGS).stat().st_size > 0


def test_a_long_step_is_timed_once_and_a_short_one_more_often(monkeypatch):
    """The clock moves with each step; the first takes ten times as long as the others, and is not counted."""
    from sfumato.planning import clock

    for step, timed in ((1.0, 1), (0.01, clock.STEPS)):
        reading, done = [0.0], []
        monkeypatch.setattr(clock, "now", lambda reading=reading: reading[0])

        def train(told, step=step, reading=reading, done=done):
            for i in range(20):
                reading[0] += step * (10 if i == 0 else 1)
                done.append(i)
                told(i + 1, 20)

        assert clock.seconds_of_steps(train) == pytest.approx(step) and len(done) == 1 + timed


def test_a_file_of_another_machine_is_not_believed(tmp_path):
    path = tmp_path / TIMINGS
    path.parent.mkdir()
    path.write_text(json.dumps({"machine": {"processor": "another"}, "seconds": {"start": [1.0]}}))
    assert Timings(tmp_path).known == {}
    for damaged in ("[]", "{", '{"machine": 3}'):
        path.write_text(damaged)
        assert Timings(tmp_path).known == {}


def test_a_public_text_to_image_model_has_no_time(state):
    model = {"directory": "models/none"}
    found = expected(Timings(state), recipe="dp-lora", model=model, embedding={}, teacher={})
    assert found["finetune"] is None and found["pretrain"] is None and found["central"] == IDLE


def test_a_dp_gan_takes_longer_with_more_steps_and_larger_draws(state):
    small = {"noise": 100.0, "width": 8, "discriminator": 4, "fakes": 10, "images": 100, "steps": 100, "batch": 100}
    timings = Timings(state)
    once, longer, larger = (
        expected(timings, recipe="dp-gan", adversarial={**small, **change})["adversarial"]
        for change in ({}, {"steps": 200}, {"batch": 400})
    )
    assert longer > once and larger > once
