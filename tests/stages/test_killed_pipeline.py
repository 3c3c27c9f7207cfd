"""What an image more costs, and what a kill leaves: nothing is paid twice, nothing is resumed for free.

The tests of this module share one repository and run in the order of the file, each from what the last one left.
"""

import json
import shutil
import signal
import subprocess
import time

import pytest
from small_repository import QUERIES, SIZE, Repository, make_repository, ran


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Repository:
    made = make_repository(tmp_path_factory.mktemp("repository"))
    made.repro()
    return made


def test_an_image_more_runs_every_query(repository):
    """Once the owner says that the images are others: nothing that is public tells it, so nothing spends unasked."""
    repository.write_source(SIZE + 1)
    before = len(repository.opened())
    card = (repository.path / "data/sensitive/card.json").read_text()
    assert repository.run("stage", "prepare", "sensitive")[0] == 0
    assert (repository.path / "data/sensitive/card.json").read_text() == card
    repository.edit(data={"version": "2"})
    repository.repro()
    assert sorted(repository.opened()[before:]) == QUERIES


def wait_for(repository: Repository, uses: int, process: subprocess.Popen) -> None:
    """Until a charge opened since has so many durable uses (0: until it is opened)."""
    for _ in range(1200):
        last = [entry for entry in repository.journal() if entry["kind"] in ("open", "progress")][-1]
        if (last["kind"] == "open" and uses == 0) or (last["kind"] == "progress" and last["uses"] >= uses):
            return
        assert process.poll() is None, "finetune ended before it could be killed"
        time.sleep(0.05)
    raise AssertionError("finetune made no progress")


def test_a_killed_run_resumes_and_is_paid_for_once(repository):
    repository.edit(
        finetune={"learning_rate": 1e-4, "ratio": 0.5}
    )  # new work, on other matrices of the same saliency release
    before = len(repository.opened())
    assert repository.run("stage", "plan")[0] == 0
    for uses in (0, 5, 17):
        entries = len(repository.journal())
        process = subprocess.Popen(
            ["stage", "finetune"],
            cwd=repository.path,
            env=repository.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while uses == 0 and len(repository.journal()) == entries and process.poll() is None:
            time.sleep(0.05)
        wait_for(repository, uses, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    run = repository.path / "state" / "runs" / repository.journal()[-1]["id"]
    shutil.copytree(run, repository.path / "aside")
    text = repository.repro()
    assert "resuming run" in text and "finetune" in ran(text)
    assert repository.opened()[before:] == ["finetune"]
    log = (repository.path / "artifacts/finetune/log.csv").read_text().splitlines()
    assert [int(row.split(",")[0]) for row in log[1:]] == list(range(1, 41))
    assert not list(run.glob("checkpoint-*"))


def test_a_checkpoint_kept_aside_cannot_be_resumed_for_free(repository):
    run = repository.path / "state" / "runs" / repository.journal()[-2]["id"]
    closed = [entry["id"] for entry in repository.journal() if entry["kind"] == "close"][-1]
    run = repository.path / "state" / "runs" / closed
    shutil.copytree(repository.path / "aside", run, dirs_exist_ok=True)
    code, text = repository.run("stage", "finetune")
    assert code == 3 and "already released" in text
    before = len(repository.opened())
    repository.edit(privacy={"spend_again": ["finetune"]})
    assert repository.run("stage", "plan")[0] == 0
    code, text = repository.run("stage", "finetune")
    assert code == 0 and "resuming" not in text, text
    assert repository.opened()[before:] == ["finetune"]


def test_a_trimmed_ledger_is_found(repository):
    from sfumato.storage.digest import digest_of

    repository.edit(privacy={"spend_again": []})
    path = repository.path / "ledger.json"
    ledger = json.loads(path.read_text())
    whole = path.read_text()
    del ledger["digest"]
    ledger["records"] = [record for record in ledger["records"] if record["stage"] != "frequency"]
    path.write_text(json.dumps({**ledger, "digest": digest_of(ledger)}))
    code, text = repository.run("stage", "ledger", "check")
    path.write_text(whole)
    assert code == 3 and "frequency ran" in text and "md5" in text
