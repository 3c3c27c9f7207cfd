"""Over two processes too, one image or one group more or less moves every sum by at most its bound."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import CASES
from left_out import SINGLES
from test_groups import SIZES

SCRIPT = Path(__file__).with_name("left_out.py")
LEFT_OUT = [*(("group", str(group)) for group in range(len(SIZES))), *(("image", str(image)) for image in SINGLES)]


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """What two gloo processes release together."""
    out = tmp_path_factory.mktemp("two") / "sums.pt"
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT), str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(out)


@pytest.mark.parametrize(("unit", "who"), LEFT_OUT)
@pytest.mark.parametrize("query", CASES)
def test_leaving_one_out_moves_the_sum_over_two_processes_by_at_most_the_bound(query, unit, who, sums):
    moved = float((sums[f"{query}, {unit} whole"] - sums[f"{query}, {unit} {who}"]).norm())
    assert moved <= CASES[query].bound * (1 + 1e-5)
    assert moved > 0.01 * CASES[query].bound  # it was in the sum


def test_both_processes_have_a_part_of_the_sum(sums):
    """A process that sees nothing would make the test above easy: all 9 groups and 226 images are in the counts."""
    assert float(sums["count, group whole"].sum()) == pytest.approx(9, abs=1e-3)
    assert float(sums["count, image whole"].sum()) == pytest.approx(226, abs=1e-3)
