"""Faults of the machine and of files, as a user meets them: an exit code, one sentence, nothing half-written."""

import csv
import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from small_record import small_record

from sfumato.data.images import ImageSet
from sfumato.data.lineage import lineage
from sfumato.errors import DataError
from sfumato.privacy.events import Mechanism
from sfumato.privacy.odometer import Odometer
from sfumato.privacy.resolved import read_stage_plan
from sfumato.release.exports import METADATA, PNG, mark_of, save_png_folders
from sfumato.storage.artifacts import read_artifact, writing
from sfumato.storage.files import csv_text
from sfumato.storage.weights import load_network, load_tensors, save_tensors
from stages import cli
from stages.dvc_lock import COPY, LOCK, damage, keep_copy, lock_in_words
from stages.state import read_policy


@pytest.fixture
def fails(desk, monkeypatch):
    """A function: what the program answers if its command raises this."""

    def with_fault(fault: BaseException) -> tuple[int, str]:
        def fail(**_: str) -> None:
            raise fault

        monkeypatch.setattr(cli, "app", fail)
        return desk("plan")

    return with_fault


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x.npy"), 4, "x.npy: No space left on device. Nothing half"),
        (OSError(errno.EROFS, "Read-only file system", "x"), 4, "x: Read-only"),
        (MemoryError(), 4, "memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), 4, "memory"),
        (RecursionError("maximum recursion depth exceeded"), 4, "nested too deeply"),
        (BrokenPipeError(), 1, ""),
    ],
)
def test_what_the_machine_cannot_do_is_one_sentence(fails, fault, code, words):
    found, text = fails(fault)
    assert found == code and words in text


def test_a_name_in_an_error_cannot_paint_the_screen(fails):
    fault = DataError("a\x1b[2Jb\u202e is bad\nanother")
    assert fails(fault) == (4, "error: a\\x1b[2Jb\\u202e is bad\nanother\n")


def test_a_bug_is_no_fault_of_the_machine(fails):
    with pytest.raises(RuntimeError):
        fails(RuntimeError("shapes do not fit"))


@pytest.fixture
def planned(desk):
    """With the digits prepared, and a plan."""
    desk.base = {"recipe": "dpdm"}
    desk.params()
    desk.run_all("prepare sensitive", "plan")
    return desk


# entry -> value of another kind, in files that a stage reads
CARD = {"classes": 5, "shape": [0, 8, 8], "dataset_id": "../digits", "range": None, "version": 7, "more": 1}
PERMISSION = {"delta": "small", "lifetime_epsilon": [], "accountant": "none", "declared_size": "yes", "more": 1}


@pytest.mark.parametrize("entry", CARD)
def test_a_card_of_another_shape_is_one_sentence(planned, entry):
    path = Path("data/sensitive/card.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {entry: CARD[entry]}))
    planned.run("plan", f"not a data card ({entry}", code=4)


@pytest.mark.parametrize("entry", PERMISSION)
def test_a_permission_of_another_shape_opens_no_charge(planned, entry):
    path = Path("artifacts/plan/permission.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {entry: PERMISSION[entry]}))
    with pytest.raises(cli.SfumatoError, match=entry):
        read_policy()


@pytest.mark.parametrize("entry", ["size_hint", "target", "delta", "recipe"])
def test_a_budget_of_another_shape_writes_no_ledger(planned, entry):
    path = Path("artifacts/plan/budget.json")
    for wrong in (json.dumps(json.loads(path.read_text()) | {entry: []}), "[]", "{", '{"a": ' * 1000, "\x00"):
        path.write_text(wrong)
        planned.run("ledger write", "budget.json cannot be read", code=2)
        assert not Path("ledger.json").exists()


@pytest.mark.parametrize("name", ["../../etc", "/tmp/x", "a/b", "digits.journal"])
def test_a_dataset_id_leads_nowhere_else(planned, name):
    planned.run(f"ledger history --dataset {name}", "not a valid dataset id", code=2)
    planned.params(data={"dataset_id": name})
    planned.run("prepare sensitive", code=2)
    plan = Path("artifacts/plan/finetune.yaml")
    plan.write_text(yaml.safe_dump(yaml.safe_load(plan.read_text()) | {"dataset_id": name}))
    with pytest.raises(cli.SfumatoError, match="cannot be used"):
        read_stage_plan(plan, "finetune")


def test_the_doctor_names_the_lock_that_a_kill_left_empty_and_the_cure(desk):
    desk.run("doctor", "free")
    lock = Path(".dvc/tmp/rwlock")
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert "rm .dvc/tmp/rwlock" in " ".join(desk.run("doctor").replace("│", " ").split())
    lock.write_text("{}")
    assert "damaged" not in desk.run("doctor")


def test_a_dvc_lock_that_a_kill_cut_is_named_and_its_whole_copy_brings_it_back(desk):
    assert lock_in_words() == "not there yet"
    whole = (Path(__file__).parents[2] / "dvc.lock").read_bytes()
    LOCK.write_bytes(whole)
    keep_copy()  # no DVC here: nowhere to keep it
    assert not COPY.exists() and lock_in_words() == "whole"
    COPY.parent.mkdir(parents=True)
    keep_copy()
    assert COPY.read_bytes() == whole
    for length in range(0, len(whole), 97):  # wherever DVC was stopped
        LOCK.write_bytes(whole[:length])
        keep_copy()
        assert COPY.read_bytes() == whole and damage() is not None
    assert "cp .dvc/tmp/whole.lock dvc.lock" in " ".join(desk.run("doctor").replace("│", " ").split())
    LOCK.write_bytes(whole.replace(b"nfiles: 31", b"nfiles: 32"))  # DVC goes on
    keep_copy()
    assert COPY.read_bytes() == LOCK.read_bytes() and lock_in_words() == "whole"


FIRST, SECOND = (small_record(int(digit * 32, 16), Mechanism(noise_multiplier=2.0)) for digit in "ab")


def test_the_history_says_where_the_whole_state_is_an_older_copy(planned):
    state = Path("state").absolute()
    odometer = Odometer(state, "digits")
    odometer.append("open", record=FIRST, plan="p", work="w")
    shutil.copytree(state, "older")
    odometer.append("open", record=SECOND, plan="p", work="w")
    Path("ledger.json").write_text(json.dumps({"records": [FIRST, SECOND]}))
    assert "incomplete" not in planned.run("ledger history")
    shutil.rmtree(state)
    shutil.copytree("older", state)
    planned.run("ledger history", "incomplete", "lacks bbbbbbbb", "older copy")


def test_weights_that_are_no_numbers_are_refused_though_their_hash_fits(tmp_path):
    with writing(tmp_path / "pretrain", "pretrain") as folder:
        save_tensors({"weight": torch.tensor([[1.0, float("nan")]])}, folder / "weights.safetensors")
        (folder / "config.json").write_text('{"in_features": 2, "out_features": 1, "bias": false}')
    assert read_artifact(tmp_path / "pretrain", "pretrain").enabled
    with pytest.raises(DataError, match="not finite"):
        load_network(tmp_path / "pretrain", torch.nn.Linear, "pretrain")
    (tmp_path / "cut").write_bytes(b"\x08")
    with pytest.raises(ValueError, match="eader"):
        load_tensors(tmp_path / "cut")


@pytest.mark.parametrize("name", ["=cmd|'/C calc'!A0", "+1", "-1", "@SUM(1)"])
def test_a_spreadsheet_computes_no_name(tmp_path, name):
    images = ImageSet(np.zeros((2, 4, 4, 1), np.uint8), np.array([0, 1]), (name, "b"))
    save_png_folders(tmp_path, images, np.full(2, "plain"), mark_of(["finetune"]))
    with (tmp_path / PNG / METADATA).open(newline="") as file:
        heads, *rows = csv.reader(file)
    assert not any(cell.startswith(("=", "+", "-", "@")) for row in (heads, *rows) for cell in row)
    assert all((tmp_path / PNG / row[0]).is_file() for row in rows)
    assert csv_text([{"x": -1.5, "y": "a"}], {"x": ".1f", "y": ""}) == "x,y\n-1.5,a\n"  # a number is a number


def test_what_is_remembered_of_a_release_is_held_to_its_form(tmp_path):
    (tmp_path / "state/released").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/a.png").write_bytes(b"x")
    for wrong in ("[]", "{", '{"records": [], "hashes": []}', '{"records": {}, "hashes": 5}'):
        (tmp_path / "state/released/a.json").write_text(wrong)
        with pytest.raises(DataError, match="what was released is not known"):
            lineage(tmp_path / "model", "model", True, tmp_path / "state")


def test_what_is_private_is_its_owner_s_alone_whatever_the_umask(desk):
    before = os.umask(0)
    try:
        desk.params(recipe="dpdm")
        desk.run_all("prepare sensitive", "plan")
        Odometer(Path("state").absolute(), "digits").append("open", record=FIRST, plan="p", work="w")
    finally:
        os.umask(before)
    assert Path("state").stat().st_mode & 0o777 == 0o700  # nobody else gets to anything below
    for path in Path("state").rglob("*"):
        private = path.is_dir() or path.suffix != ".lock"
        assert not private or path.stat().st_mode & 0o077 == 0, path
