"""In two processes that differ, adding or removing one image or one group changes every sum by at
most its bound.

A query that is `one_process` in the table of stages opens no charge in many processes.
"""

from types import SimpleNamespace

import pytest
import torch
from joined_processes import run_joined
from left_out import SHARED, SINGLES, main
from test_groups import SIZES

from sfumato.errors import ConfigError
from sfumato.runtime import distributed
from sfumato.settings.stages import QUERIES, STAGES
from stages import runner

LEFT_OUT = [
    *(("group", str(group)) for group in range(len(SIZES))),
    *(("image", str(image)) for image in SINGLES),
]


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """Return the joint releases of two gloo processes."""
    out = tmp_path_factory.mktemp("two") / "sums.pt"
    run_joined(2, main, out)
    return torch.load(out)


@pytest.mark.parametrize(("unit", "who"), LEFT_OUT)
@pytest.mark.parametrize("query", SHARED)
def test_one_image_moves_the_sum_of_two_processes_by_the_bound(query, unit, who, sums):
    moved = float((sums[f"{query}, {unit} whole"] - sums[f"{query}, {unit} {who}"]).norm())
    assert moved <= SHARED[query].bound * (1 + 1e-5)
    assert moved > 0.01 * SHARED[query].bound  # the unit was in the sum


@pytest.mark.parametrize("query", SHARED)
def test_processes_that_compute_other_rows_release_nothing(query, sums):
    assert sums[f"{query}, refused"] is True


@pytest.mark.parametrize("stage", [stage for stage in QUERIES if not STAGES[stage].spread])
def test_a_single_process_query_refuses_many_processes(stage, owner, monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(ConfigError, match=f"{stage} runs in one process, not in 2"):
        owner.open(stage=stage)
    assert not owner.odometer.opened()


@pytest.mark.parametrize("stage", [stage for stage in QUERIES if not STAGES[stage].spread])
def test_a_query_that_runs_alone_refuses_to_be_launched(stage, tmp_path, monkeypatch, environment):
    """The query refuses before anything is read or opened.

    It does not fall back to one process, because several processes were requested.
    """
    plan = SimpleNamespace(enabled=True, settings=SimpleNamespace(reads=lambda name: False))
    monkeypatch.setattr(runner, "load_plan", lambda *given: plan)
    environment["SFUMATO_LAUNCH"] = "torchrun --nproc-per-node=2"
    with pytest.raises(ConfigError, match=f"{stage} runs in one process: unset SFUMATO_LAUNCH"):
        runner.run_stage(STAGES[stage], out=tmp_path / "out")


def test_the_queries_that_share_their_work_are_these():
    """Each query is tested above. A query without a case fails in `test_queries.py`."""
    assert {case.stage for case in SHARED.values()} == {
        name for name in QUERIES if STAGES[name].spread
    }


def test_both_processes_have_a_part_of_the_sum(sums):
    """If the images of only one process counted, the tests above could still pass.

    Each image is in one of the processes, and the joint sum counts all 9 groups and 226 images.
    """
    assert float(sums["count, group whole"].sum()) == pytest.approx(9, abs=1e-3)
    assert float(sums["count, image whole"].sum()) == pytest.approx(226, abs=1e-3)
