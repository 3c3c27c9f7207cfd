"""`stage plan`: its output, its refusals, and how the stages read its files."""

import json
from pathlib import Path

import pytest
import yaml

from sfumato.errors import SfumatoError
from sfumato.privacy.resolved import read_stage_plan
from stages.state import read_policy


@pytest.fixture
def planned(desk):
    """Prepare the digits, and write a plan."""
    desk.base = {"recipe": "dpdm"}
    desk.params()
    desk.run_all("prepare sensitive", "plan")
    return desk


def test_delta_is_rounded_up_on_every_page(desk):
    """1 / (3600 ln 3600) is 3.3922e-5."""
    desk.params(recipe="dpdm", privacy={"size_hint": 3600})
    desk.run("prepare sensitive")
    desk.run("plan", "δ = 3.4e-05")


def test_a_plan_without_dvc_yaml_names_what_a_run_needs(desk):
    desk.base = {"recipe": "dp-merf", "profile": None, "privacy": {"size_hint": 1000}}
    desk.params(data={"dataset_id": "digits"})
    desk.run("prepare sensitive")
    words = "`stage run` needs dvc.yaml"
    desk.run("plan --dry-run", words)
    Path("dvc.yaml").touch()
    assert words not in desk.run("plan --dry-run")


def test_parquet_without_its_library_is_refused_by_the_plan(desk, uninstall):
    desk.params(recipe="dp-merf", synthesize={"export": ["parquet"]})
    uninstall("pyarrow")
    desk.run("plan", "sfumato[parquet]", code=2)


def test_a_plan_removes_system_files_and_refuses_others(planned):
    for name in (".DS_Store", "Thumbs.db", "desktop.ini"):
        Path("artifacts/plan", name).touch()
    planned.run("plan")
    assert {path.suffix for path in Path("artifacts/plan").iterdir()} == {".yaml", ".json", ".csv"}
    Path("artifacts/plan/notes.txt").touch()
    planned.run("plan", "do not belong to a plan", code=2)


# entry -> value of another kind, in files that a stage reads
CARD = {
    "classes": 5,
    "shape": [0, 8, 8],
    "dataset_id": "../digits",
    "range": None,
    "version": 7,
    "more": 1,
}
PERMISSION = {
    "delta": "small",
    "lifetime_epsilon": [],
    "accountant": "none",
    "declared_size": "yes",
    "more": 1,
}


@pytest.mark.parametrize("entry", CARD)
def test_a_card_of_another_shape_is_one_sentence(planned, entry):
    path = Path("data/sensitive/card.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {entry: CARD[entry]}))
    planned.run("plan", f"not a data card ({entry}", code=4)


@pytest.mark.parametrize("entry", PERMISSION)
def test_a_permission_of_another_shape_opens_no_charge(planned, entry):
    path = Path("artifacts/plan/permission.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {entry: PERMISSION[entry]}))
    with pytest.raises(SfumatoError, match=entry):
        read_policy()


@pytest.mark.parametrize("name", ["../../etc", "/tmp/x", "a/b", "digits.journal"])
def test_a_dataset_id_leads_nowhere_else(planned, name):
    planned.run(f"ledger history --dataset {name}", "not a valid dataset id", code=2)
    planned.params(data={"dataset_id": name})
    planned.run("prepare sensitive", code=2)
    plan = Path("artifacts/plan/finetune.yaml")
    plan.write_text(yaml.safe_dump(yaml.safe_load(plan.read_text()) | {"dataset_id": name}))
    with pytest.raises(SfumatoError, match="cannot be used"):
        read_stage_plan(plan, "finetune")
