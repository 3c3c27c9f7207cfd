"""`evaluate` in several processes: the numbers of one, each classifier trained once, the images opened once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from dealt_out import main

from sfumato.data.prepare import prepare_sensitive
from sfumato.evaluation import scores
from sfumato.privacy.odometer import LOCAL, Odometer
from sfumato.runtime.distributed import map_sharded
from sfumato.settings.data import Data

SCRIPT = Path(__file__).with_name("dealt_out.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dealt")
    prepare_sensitive(Data(), folder / "state", folder / "card.json", folder / "raw")
    return folder


def run(folder: Path, processes: int) -> list[dict]:
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", str(SCRIPT), str(folder)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank-{rank}-of-{processes}.json").read_text()) for rank in range(processes)]


def opened(folder: Path) -> int:
    return sum(entry["kind"] == LOCAL for entry in Odometer(folder / "state", "digits").entries())


def test_two_processes_find_what_one_finds_and_train_each_classifier_once(folder, monkeypatch):
    before = opened(folder)
    monkeypatch.setattr(scores, "evaluate_classifier", scores.evaluate_classifier)  # `main` replaces it
    main(folder)
    one = json.loads((folder / "rank-0-of-1.json").read_text())
    assert opened(folder) == before + 1
    several = run(folder, 2)
    assert opened(folder) == before + 2  # the first process journals for both
    assert all(rank["found"] == one["found"] for rank in several)
    shares = [rank["trained"] for rank in several]
    assert len(one["trained"]) == 12 and [len(share) for share in shares] == [6, 6]
    assert sorted(shares[0] + shares[1]) == sorted(one["trained"])
    assert len(set(one["found"]["release"]["mlp"]["per_seed"])) > 1  # or the order of seeds would not show


def test_one_process_does_all_tasks_in_order():
    done = []
    assert map_sharded([3, 1, 2], lambda task: done.append(task) or -task) == [-3, -1, -2] and done == [3, 1, 2]
