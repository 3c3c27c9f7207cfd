"""In several processes, `evaluate` computes the same numbers as in one.

Each classifier is trained once, and the journal gets one entry.
"""

import json
from pathlib import Path

import pytest
from dealt_out import main
from joined_processes import run_joined

from sfumato.data.prepare import prepare_sensitive
from sfumato.privacy.odometer import LOCAL_USE, Odometer
from sfumato.runtime.distributed import map_sharded
from sfumato.settings.data import Data


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dealt")
    prepare_sensitive(Data(), folder / "state", folder / "card.json", folder / "raw")
    return folder


def opened(folder: Path) -> int:
    return sum(
        entry["kind"] == LOCAL_USE for entry in Odometer(folder / "state", "digits").entries()
    )


def test_two_processes_find_the_same_and_share_the_training(folder):
    before = opened(folder)
    main(folder)
    one = json.loads((folder / "rank-0-of-1.json").read_text())
    assert opened(folder) == before + 1
    run_joined(2, main, folder)
    several = [json.loads((folder / f"rank-{rank}-of-2.json").read_text()) for rank in range(2)]
    assert opened(folder) == before + 2  # the first process journals for both
    assert all(rank["found"] == one["found"] for rank in several)
    shares = [rank["trained"] for rank in several]
    assert len(one["trained"]) == 12 and [len(share) for share in shares] == [6, 6]
    assert sorted(shares[0] + shares[1]) == sorted(one["trained"])
    # Otherwise, the test would not find a wrong order of the seeds
    assert len(set(one["found"]["release"]["mlp"]["per_seed"])) > 1


def test_one_process_does_all_tasks_in_order():
    done = []
    assert map_sharded([3, 1, 2], lambda task: done.append(task) or -task) == [
        -3,
        -1,
        -2,
    ] and done == [3, 1, 2]
