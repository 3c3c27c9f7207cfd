"""Expected times: in proportion to the work, corrected by past runs, without a look at the images."""

import json
import platform
import stat
import time
from dataclasses import replace

import pytest
import torch
from small_plan import params as params_of
from torch import nn

from sfumato.features.batch_invariant import one_thread
from sfumato.planning import estimate
from sfumato.planning.cost import Cost, cost_of
from sfumato.planning.estimate import FILE, FRAME, OFF, WORK, expected_seconds, products_per_second, remember, timed
from sfumato.privacy.resolved import StagePlan
from sfumato.runtime import compute
from sfumato.settings.stages import STAGES

SMALL = {
    "recipe": "teacher-generator",
    "profile": None,
    "data": {"dataset_id": "set", "source": "imagefolder", "path": "/nowhere"},
    "privacy": {"epsilon": 1.0, "size_hint": 500},
    "frequency": {"size": 100},
    "auxiliary": {"width": 8, "batch": 200, "steps": 600},
}


@pytest.fixture(autouse=True)
def speed(monkeypatch):
    monkeypatch.setattr(estimate, "products_per_second", lambda bfloat16: 1e9)
    monkeypatch.setattr(estimate, "written_per_second", lambda: 1e8)
    monkeypatch.setattr(estimate, "THREADS", 4)


def expected(state, **changes):
    params = params_of(**SMALL | changes)
    return params, expected_seconds(params, (1, 8, 8), 3, state, public_images=200)


def plan_of(params, name):
    about = {"shape": (1, 8, 8), "classes": ("a", "b", "c"), "size_hint": 500, "digest": ""}
    return StagePlan(stage=name, enabled=True, settings=getattr(params, name), **about)


def test_the_operations_of_a_network_are_those_of_its_products():
    network = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(48, 5))
    cost = cost_of(network, torch.zeros(1, 2, 4, 4))
    assert cost.products == 2 * (16 * 3 * 2 * 9 + 48 * 5) and cost.width == 5


@pytest.mark.parametrize("recipe", ["teacher-generator", "full", "sapf-pixel", "teacher-public", "privimage"])
def test_every_stage_of_a_recipe_has_a_time_and_one_that_is_off_hardly_any(recipe, tmp_path):
    params, found = expected(tmp_path, recipe=recipe, profile="digits", frequency={}, auxiliary={})
    assert set(found) == {*STAGES, *FRAME} and set(WORK) <= set(STAGES)
    for name, seconds in found.items():
        assert seconds == OFF if name in STAGES and not params.runs(name) else seconds > OFF, name


def test_more_work_takes_longer_in_proportion(tmp_path):
    one, twice, thrice = (
        expected(tmp_path, auxiliary={**SMALL["auxiliary"], "steps": 600 * times})[1]["auxiliary"]
        for times in (1, 2, 3)
    )
    assert thrice - twice == pytest.approx(twice - one) and twice > one
    many = expected(tmp_path, privacy={"epsilon": 1.0, "size_hint": 5000})[1]
    assert many["frequency"] > expected(tmp_path)[1]["frequency"]


def test_the_levels_of_a_large_image_cost_what_they_draw_and_look_at(tmp_path):
    """Half of the steps of the first fit draw 32 pixels, those of `refine` all draw 128."""
    features = [{"map": "pixels", "length_scales": [0.4], "block": block} for block in (1, 2, 4)]
    params = params_of(**SMALL | {"frequency": {"size": 120, "features": features}})
    work = estimate.Work(params, (1, 128, 128), 3, estimate.Machine(tmp_path), 200)
    costs = [work.generator(block) + work.fourier(block) for block in (4, 2, 1)]
    assert costs[0].elements < costs[1].elements / 2 < costs[2].elements / 4
    fit, drawn = params.auxiliary, Cost(0)
    one, whole = work.fit(fit, drawn, coarse_to_fine=True), work.fit(fit, drawn)
    seconds = [work.training(cost, fit) for cost in costs]
    assert whole - one == pytest.approx(seconds[2] - (2 * seconds[0] + seconds[1] + seconds[2]) / 4, rel=0.01)


def test_a_past_run_corrects_the_estimate_of_more_work_too(tmp_path):
    params, first = expected(tmp_path)
    work = first["auxiliary"] - first["plan"]
    remember(tmp_path, plan_of(params, "auxiliary"), 2 * work)
    more = {"auxiliary": {**SMALL["auxiliary"], "steps": 900}}
    after, longer = expected(tmp_path)[1], expected(tmp_path, **more)[1]
    assert after["auxiliary"] - after["plan"] == pytest.approx(2 * work, rel=0.05)  # kept to two digits
    assert longer["auxiliary"] - longer["plan"] > 1.4 * (after["auxiliary"] - after["plan"])
    remember(tmp_path, plan_of(params, "auxiliary"), work / 10)  # a run that was resumed at its end
    assert expected(tmp_path)[1] == first


def test_durations_are_private_and_rounded(tmp_path):
    params, _ = expected(tmp_path)
    remember(tmp_path, plan_of(params, "frequency"), 123.456)
    file = tmp_path / FILE
    assert json.loads(file.read_text())["runs"]["frequency"]["seconds"] == 120.0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_damaged_file_or_one_of_another_machine_is_not_used(tmp_path):
    _, first = expected(tmp_path)
    content = json.loads((tmp_path / FILE).read_text())
    for text in ("[]", "{", '{"machine": 3}', json.dumps({**content, "machine": ["another"], "speed": 1.0})):
        (tmp_path / FILE).write_text(text)
        assert expected(tmp_path)[1] == first


def test_a_stage_without_an_estimate_has_that_of_its_last_run(tmp_path):
    changes = {"recipe": "dp-lora", "model": {"directory": "models/none"}, "embedding": {}, "teacher": {}}
    params, found = expected(tmp_path, **changes)
    assert found["finetune"] is None and found["pretrain"] is None and found["central"] == OFF
    remember(tmp_path, replace(plan_of(params, "finetune"), model=params.model), 50.0)
    assert expected(tmp_path, **changes)[1]["finetune"] == 50.0 + found["plan"]


def test_the_estimate_is_of_an_idle_machine_whatever_number_of_threads_is_fastest_now(tmp_path, monkeypatch):
    params, first = expected(tmp_path)
    plan, work = plan_of(params, "auxiliary"), first["auxiliary"] - first["plan"]
    with one_thread():  # beside other programs
        clock = iter([0.0, work * 4**estimate.PARALLEL])
        monkeypatch.setattr(estimate, "now", lambda: next(clock))
        with timed(tmp_path, plan):
            pass
        assert expected(tmp_path)[1]["auxiliary"] == pytest.approx(first["auxiliary"], rel=0.05)
    monkeypatch.setattr(estimate, "THREADS", 1)
    alone = expected(tmp_path)[1]
    assert alone["auxiliary"] - alone["plan"] == pytest.approx(work * 4**estimate.PARALLEL, rel=0.05)


def test_the_minutes_are_of_the_device_that_will_be_used_not_of_a_gpu_that_will_not(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "a GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: waits.append(1))
    waits = []
    found = {}
    for asked in ("cpu", "cuda"):
        monkeypatch.setenv("SFUMATO_DEVICE", asked)
        compute.no_cuda.cache_clear()
        estimate.now()
        found[asked] = (estimate.Machine(tmp_path).content["machine"][1], estimate.gain(4), len(waits))
    compute.no_cuda.cache_clear()
    assert found == {"cpu": (platform.machine(), 4**estimate.PARALLEL, 0), "cuda": ("a GPU", 1.0, 1)}


def test_the_speed_is_measured_in_processor_time(monkeypatch):
    """Another program that holds the processor for a while leaves it as it was."""
    monkeypatch.undo()
    clock = time.perf_counter
    products_per_second.cache_clear()
    monkeypatch.setattr(estimate, "MEASURED", 0.05)
    monkeypatch.setattr(time, "perf_counter", lambda: 1000 * clock())
    with one_thread():
        busy = products_per_second(False)
    products_per_second.cache_clear()
    monkeypatch.setattr(time, "perf_counter", clock)
    with one_thread():
        assert 1 / 3 < busy / products_per_second(False) < 3
    products_per_second.cache_clear()
