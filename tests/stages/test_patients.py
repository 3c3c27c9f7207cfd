"""Patients through the stages: a plan, charges and a ledger for all images of one person."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

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


def write(**changes) -> None:
    content = {**PARAMS, **{key: {**PARAMS.get(key, {}), **value} for key, value in changes.items()}}
    Path("params.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


@pytest.fixture
def clinic(desk, digits):
    """`stage`, in a folder with digits of patients: 1 to about 20 images of each."""
    sizes = np.random.default_rng(0).geometric(0.25, 200)
    ids = np.array([f"Q7734-{i}" for i in np.repeat(np.arange(200), sizes)[:500]])
    classes = np.array([str(i) for i in range(10)])
    np.savez("set.npz", images=digits.images[:500], labels=digits.labels[:500], classes=classes, groups=ids)
    return desk


def all_of(stage, *commands: str) -> str:
    said = ""
    for words in commands:
        code, text = stage(*words.split())
        assert code == 0, (words, text)
        said += text
    return said


def test_a_release_for_patients_says_so_everywhere_and_names_nobody(clinic):
    write(**ARRAY)
    said = all_of(clinic, "prepare sensitive", "prepare public", "plan --dry-run", "plan")
    assert "frequency: a draw expects 100 of 100 groups" in said
    said += all_of(clinic, "count", "frequency", "auxiliary", "synthesize")
    others = [name for name in QUERIES if name not in ("count", "frequency")]
    said += all_of(clinic, *others, "ledger write", "ledger check --unit group --epsilon 10", "report")
    ledger = json.loads(Path("ledger.json").read_text())
    assert {record["unit"] for record in ledger["records"]} == {"all (image, label) of one group"}
    assert ledger["odometer"]["complete"]
    clinic.run("ledger check --unit image", "its privacy unit is", code=3)
    clinic.run("ledger check --unit person", code=2)
    page, card = Path("artifacts/report/index.html").read_text(), Path("artifacts/synthesize/README.md").read_text()
    assert "for any single patient, with all their images" in page and "several images of one person" not in page
    assert (
        "differ in all images of one person with their labels, added" in card
        and "several images of one person" not in card
    )
    files = [path for path in Path().rglob("*") if path.is_file() and path.name != "set.npz"]
    assert all(
        b"Q7734" not in path.read_bytes() and "Q7734".encode("utf-32-le") not in path.read_bytes() for path in files
    )
    assert "Q7734" not in said


@pytest.mark.parametrize(
    ("prepared", "asked", "message"),
    [
        ({}, {"data": {"groups": {"array": True}}}, "say privacy.unit: group"),
        ({}, {"privacy": {"unit": "group"}}, "data.groups is missing"),
        (ARRAY, {}, "prepared for one group"),
        (ARRAY, {"privacy": {"unit": "image"}}, "prepared for one group"),
        (
            ARRAY,
            ARRAY | {"privacy": {"unit": "group", "group_weight": "capped"}},
            "group_weight was removed: delete it",
        ),
        (ARRAY, {"privacy": {"group_cap": 5}}, "goes with unit: group"),
    ],
)
def test_a_plan_for_another_unit_than_was_prepared_is_refused(prepared, asked, message, clinic):
    if not prepared:  # a set without ids
        with np.load("set.npz") as archive:
            arrays = {key: archive[key] for key in archive.files if key != "groups"}
        np.savez("set.npz", **arrays)
    write(**prepared)
    all_of(clinic, "prepare sensitive")
    write(**asked)
    clinic.run("plan", message, code=2)


def test_a_cap_needs_the_count(clinic):
    capped = {"privacy": {"unit": "group", "group_cap": 4}}
    write(**ARRAY | capped)
    all_of(clinic, "prepare sensitive", "plan", "count")
    record = next(iter(json.loads(Path("artifacts/count/privacy.json").read_text())["records"].values()))
    assert record["group_weight"] == "capped at 4 images"
    content = yaml.safe_load(Path("params.yaml").read_text()) | {"run": PARAMS["run"][1:]}
    Path("params.yaml").write_text(yaml.safe_dump(content))
    clinic.run("plan", "add count to run", code=2)


def test_a_plan_without_a_unit_says_so_and_is_what_it_always_was(clinic):
    with np.load("set.npz") as archive:
        np.savez("set.npz", **{key: archive[key] for key in archive.files if key != "groups"})
    plans = []
    for privacy in ({}, {"unit": "image"}):
        write(privacy=privacy)
        said = all_of(clinic, "prepare sensitive", "plan")
        assert ("privacy.unit is not said" in said) is not bool(privacy)
        plans.append({p.name: p.read_text() for p in Path("artifacts/plan").iterdir()})
    changed = {name for name in plans[0] if plans[0][name] != plans[1][name]}
    assert changed == {"permission.json"}  # the owner's word re-runs nothing
    assert not any("unit" in text or "group" in text for text in plans[0].values())
