"""With `SFUMATO_LAUNCH`, the commands and `dvc repro` run each query in two processes."""

import json
import shutil

import pytest
import yaml
from PIL import Image
from small_repository import Repository, make_repository, programs


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Repository:
    made = make_repository(tmp_path_factory.mktemp("repository"))
    # `torchrun` and the processes that it starts run by fork, and import nothing again
    module = str(programs() / "module")
    torchrun = f"{module} -m torch.distributed.run"
    made.environment["SFUMATO_LAUNCH"] = f"{torchrun} --standalone --nproc-per-node=2"
    made.environment["PYTHON_EXEC"] = module
    run = ["count", "central", "pretrain", "finetune", "synthesize", "evaluate"]
    judged = {"classifiers": ["lr"], "seeds": [0, 1], "steps": 5, "bound": False, "fidelity": []}
    steps = {"finetune": {"steps": 4, "trainable": "all"}, "pretrain": {"steps": 6}}
    made.edit(recipe="dp-feta", run=run, evaluate=judged, **steps)
    return made


def test_a_repro_in_two_processes_opens_each_charge_once(repository):
    text = repository.repro()
    assert "Traceback" not in text and "ChildFailedError" not in text
    assert sorted(repository.opened()) == ["central", "count", "finetune"]
    repository.stage("ledger check --epsilon 1 --artifacts")
    log = (repository.path / "artifacts/finetune/log.csv").read_text().splitlines()
    assert len(log) == 1 + 4
    card = json.loads((repository.path / "artifacts/synthesize/card.json").read_text())
    assert card["images"] == 120
    found = json.loads((repository.path / "metrics.json").read_text())
    assert len(found["release"]["lr"]["per_seed"]) == 2


def test_a_refusal_is_one_line_and_its_own_exit_code(repository):
    assert repository.stage("count", code=3).count("already released") == 1


def test_shards_converted_in_two_processes_end_in_one_line(repository):
    """The process that starts the other two has already read the file names, and prints nothing."""
    for shard, label in enumerate("ab"):
        folder = repository.path / f"unpacked-{shard}"
        folder.mkdir()
        for number in range(20):
            Image.new("L", (8, 8), number + 100 * shard).save(folder / f"{number}.png")
            (folder / f"{number}.cls").write_text(label)
        shutil.make_archive(str(repository.path / "tars" / str(shard)), "tar", folder)
    data = {"dataset_id": "tars", "source": "webdataset", "path": "tars", "classes": ["a", "b"]}
    params = yaml.safe_dump({"recipe": "dp-merf", "data": data})
    (repository.path / "tars.yaml").write_text(params)
    text = repository.stage("prepare sensitive --params tars.yaml --card tars.json")
    assert text.count("tars.json: dataset 'tars'") == 1
    assert json.loads((repository.path / "tars.json").read_text())["shape"] == [1, 8, 8]


def test_a_launcher_that_starts_no_group_is_named_in_a_sentence(repository, monkeypatch):
    """With `python` as the launcher, the command would start itself again without end.
    `test_launch.py` tests other launchers.
    """
    monkeypatch.setitem(repository.environment, "SFUMATO_LAUNCH", "python")
    before = repository.opened()
    text = repository.stage(
        "count --out artifacts/anew", "does not start a group of processes", code=2
    )
    assert text.count("error:") == 1 and repository.opened() == before
    assert not (repository.path / "artifacts/anew").exists()
