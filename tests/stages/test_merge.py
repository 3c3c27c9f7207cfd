"""`stage merge`: two clinics with the same settings, one release, and a ledger that is valid for
the people of each clinic.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import yaml
from clinics import begin_clinics

from sfumato.planning.merge import write_plans
from sfumato.privacy.check import check_ledger
from sfumato.privacy.ledger import build_ledger, read_budget, read_ledger
from sfumato.release.verify import results_of
from sfumato.settings.stages import STAGES
from sfumato.storage.artifacts import read_artifact
from sfumato.storage.records import Records

FREE = (
    "auxiliary",
    "classifier",
    "refine",
    "select",
    "pretrain",
    "synthesize",
    "student",
    "ledger write",
    "report",
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory, digits):
    return begin_clinics(
        tmp_path_factory.mktemp("clinics"),
        digits,
        north={"epsilon": 5},
        south={"epsilon": 3, "accountant": "exact"},
    )


@pytest.fixture
def clinics(desk, begun, here, environment):
    """Return `desk` in a folder beside two clinics, which released counts and an embedding of their
    own digits.
    """
    for name in ("north", "south"):
        shutil.copytree(begun / name, here / name)
    environment["SFUMATO_STATE"] = str(here / "state-merger")
    return desk


def test_two_clinics_release_together_at_their_own_epsilon(
    clinics, tmp_path, environment, expect_seconds, monkeypatch
):
    clinics.run("merge south north --out both", "--different-people", code=2)
    assert not Path("both").exists()
    text = clinics.run("merge south north --out both --different-people", "nothing was charged")
    merged = read_artifact(Path("both/artifacts/frequency"), "frequency")
    assert merged.records.owners == ("north", "south") and len(merged.records) == 4
    folder, command = re.search(r"next: cd (\S+) && stage (\w+)$", text.strip()).groups()
    os.chdir(folder)
    stages = yaml.safe_load(Path("dvc.yaml").read_text())["stages"]
    assert {entry["cmd"] for entry in stages.values()} == {f"stage {words}" for words in FREE}
    # No fork server, because its imports take longer than the one stage
    monkeypatch.setattr("sfumato.planning.project.forking", nullcontext)
    clinics.run(f"{command} --no-dvc select")
    assert Path("artifacts/select").exists()
    plan = Path("artifacts/plan/synthesize.yaml")
    plan.write_text(plan.read_text() + "about: {owner: Both clinics}\n")
    text = " ".join(clinics.run_all(*FREE).split())
    assert re.search(
        r"deployment.yaml was not written: set [^.]* under `about` in \S+ize.yaml", text
    )
    assert not Path(tmp_path / "state-merger/odometer").exists()  # no charge is opened

    assert all(Path(path).exists() for entry in stages.values() for path in entry["deps"])
    ledger = read_ledger(Path("ledger.json"))
    larger = read_budget(Path("../north/artifacts/plan/budget.json"))["epsilon"]
    assert ledger["epsilon"]["rdp"] == pytest.approx(larger, rel=1e-6)
    clinics.check("--epsilon 5 --artifacts", "ε = 4.9", "for each person in 'south'")
    card = Path("artifacts/synthesize/README.md").read_text()
    assert (
        "from 2 owners (north, south)" in card
        and "Both clinics" in card
        and "declared that the images of different owners show different people" in card
    )
    assert (
        json.loads(Path("artifacts/synthesize/card.json").read_text())["epsilon"]
        == ledger["epsilon"]["rdp"]
    )
    page = Path("artifacts/report/index.html").read_text()
    assert (
        "declared that <strong>the images of different owners show different people" in page
        and "had been opened on dataset" not in page
    )
    assert len(np.load("artifacts/synthesize/images.npy")) == 40
    clinics.run("ledger show", "on the datasets north, south: only each owner's own")
    assert "missing" not in clinics.run(
        "egress package", "All charges on the datasets north, south are listed"
    )
    notes = [text for passed, text in results_of(Path("package")) if passed is None]
    assert "odometer: all charges on north, south are listed only in" in notes[-1]
    form = " ".join(Path("package/risk-form.html").read_text().split())
    assert "these journals were not available here" in form and "every charge" not in form

    budget = read_budget(Path("artifacts/plan/budget.json"))
    records = ledger["records"]
    assert budget["size_hint"] == 600  # both clinics together
    for apart, words in {
        ("north",): "names only one data set, north: expected two or more",
        ("north", "elsewhere"): "no records of some of these data sets",
    }.items():
        problems = check_ledger(build_ledger(budget, Records.of(records, apart), []))[1]
        assert any(words in problem for problem in problems)
    # A terminal shows the progress, although there is no params.yaml
    expect_seconds(lambda params: dict.fromkeys(STAGES, 60.0))
    environment["DVC_STAGE"] = "synthesize"
    clinics.terminal = True
    clinics.run("synthesize", "stage 2 of 2, synthesize: about 1 min", "ε = 5.00 of 5 spent so far")
    # Without the declaration all costs add up
    together = build_ledger(budget, Records.of(records), [])
    assert together["epsilon"]["rdp"] > 1.1 * ledger["epsilon"]["rdp"]


def test_a_merged_project_explains_why_it_has_no_settings(clinics):
    clinics.run("merge south north --out both --different-people")
    os.chdir("both")
    for command in ("plan --dry-run", "ledger adopt", "prepare sensitive"):
        clinics.run(command, "this folder was made by `stage merge`", code=2)
    text = clinics.run("doctor")
    assert text.count("`stage merge`") == 1 and "stage prepare" not in text


def test_a_merge_in_a_repository_has_its_workflow_in_the_root(clinics, here):
    """GitHub runs only workflows in the root, so in another folder, no workflow would check the
    ledger.
    """
    repository = here / "shared"
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    out = repository / "sub/both"
    clinics.run(f"merge south north --out {out} --different-people", "outside the project")
    file = repository / ".github/workflows/ledger-sub-both.yml"
    workflow = yaml.safe_load(file.read_text())
    assert workflow["defaults"]["run"]["working-directory"] == "sub/both"
    assert not (out / ".github").exists()


def test_a_stage_that_no_owner_has_installed_is_left_out(clinics, monkeypatch):
    """The person who merges may have installed a package with this stage."""
    names = [name for name in STAGES if name not in ("student", "saliency")]
    monkeypatch.setattr("sfumato.planning.merge.NAMES", names)
    for folder, name in itertools.product(("north", "south"), ("student", "saliency")):
        Path(folder, f"artifacts/plan/{name}.yaml").unlink()
    clinics.run("merge south north --out both --different-people")
    assert "student" not in yaml.safe_load(Path("both/dvc.yaml").read_text())["stages"]
    Path("south/artifacts/plan/refine.yaml").unlink()
    clinics.run("merge south north --out new --different-people", "refine.yaml is missing", code=2)


def test_a_merge_has_the_delta_and_accountant_of_its_budget(tmp_path):
    """With the larger δ of one owner, the card would state too small an ε. With another accountant,
    it would contradict the ledger.
    """
    plans = {
        name: {"stage": name, "dataset_id": "north", "size_hint": 300}
        for name in ("count", "synthesize")
    }
    plans["synthesize"] |= {"delta": 1e-4, "accountant": "exact"}
    budget = {"delta": 1e-6, "accountant": "pld"}
    write_plans(plans, "north-and-south", 600, budget, tmp_path)
    for name in plans:
        content = yaml.safe_load((tmp_path / f"{name}.yaml").read_text())
        assert (content["dataset_id"], content["size_hint"]) == ("north-and-south", 600)
        assert content.get("delta", 1e-6) == 1e-6
        assert content.get("accountant", "pld") == "pld"


def test_what_does_not_add_up_is_refused_with_the_reason(clinics):
    def refused(folders: str, words: str, out: str = "out") -> None:
        clinics.run(f"merge {folders} --different-people --out {out}", words, code=2)

    shutil.copytree("north", "copy")
    refused("north copy", "have the same dataset id")
    refused("north", "expected two or more projects")
    refused("north copy/artifacts", "copy/artifacts contains no artifacts/plan: name the project")
    refused("north south", "is one of the projects to merge", "north")
    refused("north south", "is one of the projects to merge, or a folder in one", "north/new")
    refused("north south", "is already a project", "copy")
    plan = Path("south/artifacts/plan")
    file = plan / "budget.json"
    was = file.read_text()
    file.write_text(json.dumps(json.loads(was) | {"delta": 0.1}))
    refused("north south", "south cannot be merged, because its budget.json is not valid: delta=")
    file.write_text(was)
    for stage in ("finetune", "teacher"):
        file = plan / f"{stage}.yaml"
        was = (plan / f"{stage}.yaml").read_text()
        mechanism = {"noise_multiplier": 1.0, "sample_rate": 0.5, "uses": 9}
        file.write_text(
            yaml.safe_dump(yaml.safe_load(was) | {"enabled": True, "mechanism": mechanism})
        )
        refused("north south", f"releases of {stage} cannot be added up, because the steps")
        file.write_text(was)
    file = plan / "frequency.yaml"
    file.write_text(file.read_text().replace("seed: 0", "seed: 1"))
    refused("north south", "differ in frequency.seed")
    assert not Path("out").exists()
