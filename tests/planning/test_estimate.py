"""Expected times are proportional to the work, corrected by past runs, and independent of the
images.
"""

import json
import platform
import stat
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from parts import of_baselines
from small_plan import params as params_of
from torch import nn

from sfumato.planning import estimate
from sfumato.planning.estimate import (
    DURATIONS,
    FRAME,
    expected_seconds,
    operations_per_second,
    timed,
)
from sfumato.planning.work import CALL, WRITTEN, Work, operations_of
from sfumato.privacy.resolved import StagePlan
from sfumato.runtime import compute
from sfumato.runtime.compute import one_thread
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
    monkeypatch.setattr(estimate, "operations_per_second", lambda: 1e9)
    monkeypatch.setattr(estimate, "THREADS", 4)


def expected(state, **changes):
    params = params_of(**SMALL | changes)
    return params, expected_seconds(params, (1, 8, 8), 3, state, public_images=200)


def plan_of(params, name):
    about = {"shape": (1, 8, 8), "classes": ("a", "b", "c"), "size_hint": 500, "digest": ""}
    return StagePlan(stage=name, enabled=True, settings=getattr(params, name), **about)


def remember(state, plan, seconds):
    """Store a run of the stage with this many seconds on the idle machine."""
    begun = iter([0.0, seconds])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(estimate, "now", lambda: next(begun))
        patched.setattr(estimate, "gain", lambda threads: 1.0)
        with timed(state, plan):
            pass


def test_operations_count_products_and_what_takes_as_long():
    layers = nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(48, 5)
    counted = operations_of(partial(nn.Sequential, *layers), (2, 4, 4))
    products = 2 * (16 * 3 * 2 * 9 + 48 * 5)
    written = 48 + 5
    assert counted == products + WRITTEN * written + CALL * 4  # three layers and a transpose


LABELLED = ["teacher-generator", "teacher-public", "teacher-gaussian", "full"]
OTHERS = ["sapf-pixel", "privimage", "dp-mepf", *of_baselines("baseline_settings", "RECIPES")]


@pytest.mark.parametrize("recipe", [*LABELLED, *OTHERS])
def test_every_stage_has_a_time_and_disabled_ones_hardly_any(recipe, tmp_path):
    params, found = expected(tmp_path, recipe=recipe, profile="digits", frequency={}, auxiliary={})
    assert set(found) == {*STAGES, *FRAME}
    for name, seconds in found.items():
        assert seconds == 1 if name in STAGES and not params.runs(name) else seconds > 1, name


def test_more_work_takes_longer_in_proportion(tmp_path):
    one, twice, thrice = (
        expected(tmp_path, auxiliary={**SMALL["auxiliary"], "steps": 600 * times})[1]["auxiliary"]
        for times in (1, 2, 3)
    )
    assert thrice - twice == pytest.approx(twice - one) and twice > one
    many = expected(tmp_path, privacy={"epsilon": 1.0, "size_hint": 5000})[1]
    assert many["frequency"] > expected(tmp_path)[1]["frequency"]


def test_an_ordinary_query_reads_each_drawn_image_once():
    few, many = (
        Work(params_of(**SMALL | {"privacy": {"epsilon": 1.0, "size_hint": size}}), (1, 8, 8), 3)
        for size in (500, 5000)
    )
    for name in ("count", "covariance", "moments"):
        assert many.of(name) == pytest.approx(10 * few.of(name)) and few.of(name) > 0, name
    # `moments` computes features with a network
    assert few.of("moments") == 500 * few.network("classifier")


def test_gaussians_are_drawn_from_and_not_fitted():
    params = params_of(recipe="teacher-gaussian", profile="digits")
    assert Work(params, (1, 8, 8), 10).of("auxiliary") == 0


def test_every_seed_trains_on_a_release_that_is_all_plain():
    one, three = (
        Work(
            params_of(recipe="teacher-gaussian", evaluate={"seeds": seeds, "bound": False}),
            (1, 8, 8),
            10,
        )
        for seeds in ([0], [0, 1, 2])
    )
    # Each estimate also counts one training on the requested labels. So 3 seeds take twice as long
    # as 1 seed: 3 + 1 = 2 · (1 + 1)
    assert three.of("evaluate") == 2 * one.of("evaluate")


def test_levels_of_a_large_image_cost_by_pixels_drawn():
    """Half of the first fit's steps draw images of 32 pixels per side. All steps of `refine` draw
    images of 128 pixels per side.
    """
    features = [{"map": "pixels", "length_scales": [0.4], "block": block} for block in (1, 2, 4)]
    params = params_of(**SMALL | {"frequency": {"size": 120, "features": features}})
    work = Work(params, (1, 128, 128), 3)
    costs = [
        work.network("auxiliary", block) + work.network("frequency", block) for block in (4, 2, 1)
    ]
    assert costs[0] < costs[1] / 2 < costs[2] / 4
    passes = work.of("auxiliary") / (3 * params.auxiliary.batch * params.auxiliary.steps)
    assert passes == pytest.approx((2 * costs[0] + costs[1] + costs[2]) / 4, rel=0.01)
    assert work.of("refine") > 3 * params.refine.batch * params.refine.steps * costs[2]


def test_a_past_run_corrects_the_estimate_of_more_work_too(tmp_path):
    params, first = expected(tmp_path)
    work = first["auxiliary"] - first["plan"]
    remember(tmp_path, plan_of(params, "auxiliary"), 2 * work)
    more = {"auxiliary": {**SMALL["auxiliary"], "steps": 900}}
    after = expected(tmp_path)[1]
    longer = expected(tmp_path, **more)[1]
    # Durations are stored to two digits
    assert after["auxiliary"] - after["plan"] == pytest.approx(2 * work, rel=0.05)
    assert longer["auxiliary"] - longer["plan"] > 1.4 * (after["auxiliary"] - after["plan"])
    # A run as short as this one must have been resumed near its end, so it is ignored
    remember(tmp_path, plan_of(params, "auxiliary"), work / 10)
    assert expected(tmp_path)[1] == first


def test_a_run_of_another_model_or_shape_corrects_nothing(tmp_path):
    changes = {"recipe": "dp-feta", "pretrain": {"steps": 50_000}}
    params, first = expected(tmp_path, **changes)
    plan = replace(plan_of(params, "pretrain"), model=params.model)
    work = first["pretrain"] - first["plan"]
    for other in ({"model": params.model.model_copy(update={"width": 48})}, {"shape": (1, 12, 12)}):
        remember(tmp_path, replace(plan, **other), 2 * work)
        assert expected(tmp_path, **changes)[1] == first
    gaussians = params.auxiliary.model_copy(update={"target": "covariance"})
    fitted = expected(tmp_path)[1]
    remember(tmp_path, replace(plan_of(params, "auxiliary"), settings=gaussians), 3.0)
    assert expected(tmp_path)[1] == fitted
    remember(tmp_path, plan, 2 * work)
    assert expected(tmp_path, **changes)[1]["pretrain"] > 1.9 * work


def test_durations_are_private_and_rounded(tmp_path):
    params, _ = expected(tmp_path)
    remember(tmp_path, plan_of(params, "frequency"), 123.456)
    file = tmp_path / DURATIONS
    assert json.loads(file.read_text())["runs"]["frequency"]["seconds"] == 120.0
    assert (
        stat.S_IMODE(file.stat().st_mode) == 0o600
        and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    )


def test_a_damaged_file_or_one_of_another_machine_is_not_used(tmp_path):
    _, first = expected(tmp_path)
    content = json.loads((tmp_path / DURATIONS).read_text())
    for text in (
        "[]",
        "{",
        '{"machine": 3}',
        json.dumps({**content, "machine": ["another"], "speed": 1.0}),
    ):
        (tmp_path / DURATIONS).write_text(text)
        assert expected(tmp_path)[1] == first


def test_without_an_estimate_the_last_run_counts(tmp_path):
    changes = {
        "recipe": "dpdm",
        "model": {"directory": "models/none"},
        "embedding": {},
        "teacher": {},
    }
    params, found = expected(tmp_path, **changes)
    assert found["finetune"] is None and found["pretrain"] is None and found["central"] == 1
    remember(tmp_path, replace(plan_of(params, "finetune"), model=params.model), 50.0)
    assert expected(tmp_path, **changes)[1]["finetune"] == 50.0 + found["plan"]


def test_the_estimate_is_of_an_idle_machine_for_any_threads(tmp_path, monkeypatch):
    params, first = expected(tmp_path)
    plan = plan_of(params, "auxiliary")
    work = first["auxiliary"] - first["plan"]
    with one_thread():  # one thread is timed without the influence of other programs
        clock = iter([0.0, work * 2])
        monkeypatch.setattr(estimate, "now", lambda: next(clock))
        with timed(tmp_path, plan):
            pass
        assert expected(tmp_path)[1]["auxiliary"] == pytest.approx(first["auxiliary"], rel=0.05)
    monkeypatch.setattr(estimate, "THREADS", 1)
    alone = expected(tmp_path)[1]
    assert alone["auxiliary"] - alone["plan"] == pytest.approx(work * 2, rel=0.05)


def test_the_minutes_are_of_the_device_in_use(tmp_path, environment, cuda):
    waits = []
    cuda(
        is_available=True,
        device_count=1,
        get_device_name="a GPU",
        synchronize=lambda *device: waits.append(1),
    )
    found = {}
    for asked in ("cpu", "cuda"):
        environment["SFUMATO_DEVICE"] = asked
        compute.no_cuda.cache_clear()
        estimate.now()
        found[asked] = (
            estimate.Machine(tmp_path).content["machine"][1],
            estimate.gain(4),
            len(waits),
        )
    compute.no_cuda.cache_clear()
    assert found == {"cpu": (platform.machine(), 2, 0), "cuda": ("a GPU", 1.0, 1)}


def test_the_speed_is_measured_in_processor_time(monkeypatch):
    """Another program that occupies the processor for a while does not change the speed."""
    monkeypatch.undo()
    clock = time.perf_counter
    operations_per_second.cache_clear()
    monkeypatch.setattr(time, "perf_counter", lambda: 1000 * clock())
    with one_thread():
        busy = operations_per_second()
    operations_per_second.cache_clear()
    monkeypatch.setattr(time, "perf_counter", clock)
    with one_thread():
        assert 1 / 3 < busy / operations_per_second() < 3
    operations_per_second.cache_clear()


def test_two_estimates_at_once_restore_the_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    inside = threading.Event()
    left = threading.Event()

    def second() -> None:
        with one_thread():
            inside.set()
            left.wait(60)

    try:
        with one_thread():
            thread = threading.Thread(target=second)
            thread.start()
            assert not inside.wait(0.2)
        left.set()
        thread.join()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
