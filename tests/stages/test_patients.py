"""Patients through the stages: a plan, charges and a ledger for all images of one person."""

import json
from pathlib import Path

import numpy as np
import pytest

from sfumato.data.sources.packed import remove_unpacked
from sfumato.settings.stages import QUERIES

ARRAY = {"data": {"groups": {"array": True}}, "privacy": {"unit": "group"}}
PARAMS = {
    "recipe": "dp-merf",
    "profile": None,
    "data": {"dataset_id": "clinic", "source": "npz", "path": "set.npz"},
    "privacy": {"epsilon": 10, "size_hint": 100, "lifetime_epsilon": "unlimited"},
    "frequency": {"size": 200},
    "auxiliary": {"steps": 10, "images": 100},
    "synthesize": {"count": 60},
    "run": ["count", "frequency", "auxiliary", "synthesize"],
}


@pytest.fixture
def clinic(desk, digits):
    """Write digits of patients, with 1 to about 20 images each. Returns `desk`."""
    sizes = np.random.default_rng(0).geometric(0.25, 200)
    ids = np.array([f"Q7734-{i}" for i in np.repeat(np.arange(200), sizes)[:500]])
    classes = np.array([str(i) for i in range(10)])
    np.savez(
        "set.npz",
        images=digits.images[:500],
        labels=digits.labels[:500],
        classes=classes,
        groups=ids,
    )
    desk.base = PARAMS
    return desk


def drop_ids() -> None:
    with np.load("set.npz") as archive:
        arrays = {key: archive[key] for key in archive.files if key != "groups"}
    np.savez("set.npz", **arrays)


def test_a_release_for_patients_states_so_everywhere(clinic):
    clinic.params(**ARRAY)
    said = clinic.run_all("prepare sensitive", "prepare public", "plan --dry-run", "plan")
    said += clinic.run_all("count", "frequency", "auxiliary", "synthesize")
    others = [name for name in QUERIES if name not in ("count", "frequency")]
    said += clinic.run_all(*others, "ledger write", "report")
    said += clinic.check("--unit group --epsilon 10")
    ledger = json.loads(Path("ledger.json").read_text())
    assert {record["unit"] for record in ledger["records"]} == {"all (image, label) of one group"}
    assert ledger["odometer"]["complete"]
    clinic.check("--unit image", "its privacy unit is", code=3)
    clinic.check("--unit person", code=2)
    page = Path("artifacts/report/index.html").read_text()
    card = Path("artifacts/synthesize/README.md").read_text()
    assert (
        "the guarantee covers each person with all their images" in page
        and "several images of one person" not in page
    )
    assert "differ in all images of one person with their labels, added" in card
    assert "several images of one person" not in card
    remove_unpacked(Path("state"))  # the end of the process does this too
    files = [
        path.read_bytes() for path in Path().rglob("*") if path.is_file() and path.name != "set.npz"
    ]
    assert not any(
        name in content for content in files for name in (b"Q7734", "Q7734".encode("utf-32-le"))
    )
    assert "Q7734" not in said


@pytest.mark.parametrize(
    ("prepared", "asked", "message"),
    [
        ({}, {"data": {"groups": {"array": True}}}, "set privacy.unit to group"),
        ({}, {"privacy": {"unit": "group"}}, "data.groups is missing"),
        (ARRAY, {}, "prepared for the unit group"),
        (ARRAY, {"privacy": {"unit": "image"}}, "prepared for the unit group"),
        (ARRAY, {"privacy": {"group_cap": 5}}, "group_cap=5 requires `unit: group`"),
    ],
)
def test_a_plan_for_another_unit_than_was_prepared_is_refused(prepared, asked, message, clinic):
    if not prepared:
        drop_ids()
    clinic.params(**prepared)
    clinic.run("prepare sensitive")
    clinic.params(**asked)
    clinic.run("plan", message, code=2)


def test_a_cap_needs_the_count(clinic):
    capped = {"privacy": {"unit": "group", "group_cap": 4}}
    clinic.params(**ARRAY | capped)
    clinic.run_all("prepare sensitive", "plan", "count")
    record = next(
        iter(json.loads(Path("artifacts/count/privacy.json").read_text())["records"].values())
    )
    assert record["group_weight"] == "capped at 4 images"
    clinic.params(**ARRAY | capped, run=PARAMS["run"][1:])
    clinic.run("plan", "add count to `run`", code=2)


def test_a_plan_without_a_unit_warns_and_keeps_its_digest(clinic):
    drop_ids()
    plans = []
    for privacy in ({}, {"unit": "image"}):
        clinic.params(privacy=privacy)
        said = clinic.run_all("prepare sensitive", "plan")
        assert ("privacy.unit is not set" in said) is not bool(privacy)
        plans.append({p.name: p.read_text() for p in Path("artifacts/plan").iterdir()})
    changed = {name for name in plans[0] if plans[0][name] != plans[1][name]}
    assert changed == {"permission.json"}  # the owner's statement makes no stage run again
    assert not any("unit" in text or "group" in text for text in plans[0].values())
