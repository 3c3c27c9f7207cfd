"""Ledger, plan and journal as the data owner meets them: `stage ledger write|adopt|history`,
`stage plan`.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from sfumato.data.images import ImageSet, save_images
from sfumato.data.lineage import hashes, recognised
from sfumato.data.store import read_card
from sfumato.privacy.accountant import epsilon
from sfumato.privacy.authorize import ChargeRequest, open_charge
from sfumato.privacy.check import artifact_problems
from sfumato.privacy.events import UNITS, Mechanism, event_of
from sfumato.privacy.ledger import read_ledger
from sfumato.privacy.odometer import Odometer
from sfumato.privacy.policy import SpendingPolicy
from sfumato.settings.stages import QUERIES, STAGES
from sfumato.storage.artifacts import read_artifact, write_empty, writing
from stages.ledger import utc

BUDGET = {"recipe": "one", "accountant": "rdp", "delta": 1e-5, "size_hint": 1000, "target": 10.0}
PARAMS = {
    "recipe": "one",
    "profile": None,
    "data": {"dataset_id": "clinic", "source": "npz", "path": "real.npz"},
    "privacy": {"size_hint": 1000, "epsilon": 10, "lifetime_epsilon": 20},
    "frequency": {"noise": "rest"},
    "synthesize": {"sources": {"auxiliary": 1}},
    "run": ["count", "frequency", "auxiliary", "synthesize"],
}


STATE = Path("state")
CARD = Path("data/sensitive/card.json")
UNLIMITED = SpendingPolicy(delta=1e-5, lifetime_epsilon="unlimited")


def request(plan: str, mechanism: Mechanism, stage: str = "count") -> ChargeRequest:
    words = {"max_norm": 1.0, "released": "x", "sensitivity": "1"}
    return ChargeRequest(stage=stage, plan=plan, settings=plan, mechanism=mechanism, **words)


def charged(plan: str, noise: float = 5.0) -> dict:
    """Open and close a charge for a count. Returns its record."""
    work = request(plan, Mechanism(noise_multiplier=noise))
    charge = open_charge(STATE.absolute(), read_card(CARD), work, UNLIMITED)
    charge.close()
    return charge.record


def release(*records: dict) -> None:
    """Write artifacts as `dvc repro`, or DVC's cache, leaves them."""
    for name in QUERIES:
        shutil.rmtree(f"artifacts/{name}", ignore_errors=True)
        write_empty(Path("artifacts") / name, name)
    shutil.rmtree("artifacts/count")
    with writing(Path("artifacts/count"), "count", records=records):
        pass
    with writing(
        Path("artifacts/synthesize"), "synthesize", [read_artifact(Path("artifacts/count"))]
    ) as directory:
        images = np.random.default_rng(3).integers(0, 256, (20, 8, 8, 1)).astype(np.uint8)
        save_images(directory, ImageSet(images, np.arange(20) % 2, ("a", "b")))
        save_set(directory / "images.npz", images)


def save_set(path: Path | str, images: np.ndarray) -> None:
    """Write an archive of images in two classes."""
    np.savez(path, images=images, labels=np.arange(len(images)) % 2, classes=np.array(["a", "b"]))


def random_images(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, 8, 8), dtype=np.uint8)


def odometer(state: Path = STATE) -> Odometer:
    return Odometer(state.absolute(), "clinic")


def line() -> dict:
    """Return the ledger's line on the odometer."""
    return json.loads(Path("ledger.json").read_text())["odometer"]


@pytest.fixture
def desk(desk):
    """Create an owner's project: prepared images, a state directory, and a budget."""
    save_set("real.npz", random_images(60))
    Path("pipelines/one.yaml").write_text("description: one\n")
    desk.base = PARAMS
    desk.params()
    desk.run_all("prepare sensitive", "prepare public")
    Path("artifacts/plan").mkdir(parents=True)
    Path("artifacts/plan/budget.json").write_text(json.dumps(BUDGET))
    return desk


def test_the_ledger_contains_the_journals_head_and_charges(desk):
    charged("aborted")
    release(charged("p"))
    assert "incomplete" not in desk.run("ledger write")
    assert line()["charges"] == 2 and line()["complete"] and line()["head"] == odometer().head()
    desk.check()
    assert "at least" not in desk.run("ledger show", "2 charges")


def test_a_lock_may_name_a_stage_that_an_earlier_version_had(desk):
    """DVC keeps the entries of former stages; the artifact of a present stage must exist."""
    release(charged("p"))
    desk.run("ledger write")

    def problems(stage: str) -> list[str]:
        outs = [{"path": f"artifacts/{stage}", "md5": "a.dir"}]
        Path("dvc.lock").write_text(
            yaml.safe_dump({"schema": "2.0", "stages": {stage: {"outs": outs}}})
        )
        return artifact_problems(read_ledger(Path("ledger.json")), Path())

    missing = "artifacts/{} is not an artifact"
    assert not any(missing.format("denoiser") in problem for problem in problems("denoiser"))
    assert any(missing.format("classifier") in problem for problem in problems("classifier"))


def test_a_plan_with_a_removed_setting_can_be_checked(desk):
    release(charged("p"))
    desk.run("ledger write")
    plan = Path("artifacts/plan")
    plan.mkdir(exist_ok=True)
    for name in ("count", "synthesize"):
        content = {
            "stage": name,
            "enabled": True,
            "shape": [1, 8, 8],
            "revision": STAGES[name].revision,
        }
        content |= {"settings": {"gone_since": 3}, "mechanism": {"noise_multiplier": 5.0}}
        (plan / f"{name}.yaml").write_text(yaml.safe_dump(content))
    desk.check("--artifacts")
    desk.run("count", "gone_since", code=2)


def test_a_ledger_that_does_not_hold_is_not_written(desk):
    release(charged("p", noise=0.5))  # the release cost far more than the target, ε = 10
    desk.run("ledger write", "exceeds the ledger's target", code=3)
    assert not Path("ledger.json").exists()


def test_a_ledger_without_a_journal_is_called_incomplete(desk, environment):
    charged("aborted")
    release(charged("p"))
    environment["SFUMATO_STATE"] = str(Path("elsewhere").absolute())
    desk.run("ledger write", "incomplete", "clinic.jsonl does not exist. Use the state")
    assert line()["charges"] == 1 and line()["epsilon"] > 0 and not line()["complete"]
    desk.check()
    assert "at least 1 charge," in desk("ledger", "show")[1]


def test_the_history_of_its_dataset_uses_the_plans_accountant(desk):
    charged("p")
    policy = {"delta": 1e-5, "lifetime_epsilon": 20, "accountant": "exact"}
    Path("artifacts/plan/permission.json").write_text(json.dumps(policy))
    planned = desk.run("ledger history").splitlines()[-1]
    assert desk.run("ledger history --delta 1e-5").splitlines()[-1] == planned
    record = odometer().opened()[0]
    other = Odometer(STATE.absolute(), "other")
    other.begin()
    other.append("open", record={**record, "dataset_id": "other"})
    cost = epsilon([event_of(record)], 1e-5, "rdp")  # the plan is not about this dataset
    desk.run("ledger history --dataset other --delta 1e-5", f"together ε = {cost:.4f}")


def test_the_history_outside_a_project_needs_a_delta(desk, environment):
    environment["SFUMATO_STATE"] = str(STATE.absolute())
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
    desk.run("ledger history --dataset clinic", "choose δ with --delta", code=2)
    desk.run("ledger history --dataset clinic --delta 1e-5", "no history")


def test_the_history_of_two_privacy_units_is_incomplete(desk):
    charged("p")
    assert "incomplete" not in desk.run("ledger history --delta 1e-5")
    record = odometer().opened()[0]
    odometer().append("open", record={**record, "id": "2" * 32, "unit": UNITS["group"]})
    desk.run("ledger history --delta 1e-5", "incomplete: more may have been spent, or the cost")


@pytest.mark.parametrize("lost", ["older", "deleted", "cut"])
def test_a_journal_that_contradicts_the_ledger_is_refused(desk, lost):
    """For example, an older copy of the whole state directory is consistent in itself, but lacks a
    charge that the ledger contains.
    """
    first = charged("p")
    shutil.copytree("state", "copy")
    second = charged("q")
    release(first, second)
    desk.run("ledger write")
    if lost == "older":
        shutil.rmtree("state")
        shutil.move("copy", "state")
    elif lost == "deleted":
        shutil.rmtree("state")
        assert desk("prepare", "sensitive")[0] == 0  # all that an empty state directory needs
    else:
        path = odometer().path
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    for command in ("plan", "plan --dry-run"):
        desk.run(command, "stage ledger adopt", code=3)
    desk.run("ledger write", "incomplete", "run `stage ledger adopt`")
    assert line()["charges"] == 2 and not line()["complete"]
    desk.run("ledger adopt", "2 counted in total")
    desk.run("plan")
    assert len(odometer().opened()) == 2 and not odometer().complete()
    desk.run("ledger history", "2 charges", "incomplete")
    text = desk.run("ledger write", "because `stage ledger adopt` added charges to it")
    assert "lacks a charge" not in text
    assert line()["charges"] == 2 and not line()["complete"]


def test_a_copied_state_directory_continues_under_another_id(desk):
    """In an earlier version, two continuations of one run had the same id, so the ledger charged
    only one of them.
    """
    work = request("p", Mechanism(noise_multiplier=2.0, sample_rate=0.5, uses=4), stage="finetune")
    killed = open_charge(STATE.absolute(), read_card(CARD), work, UNLIMITED)
    killed._lock.close()
    shutil.copytree("state", "copy")
    records = []
    for state in (STATE, Path("copy")):
        charge = open_charge(state.absolute(), read_card(CARD), work, UNLIMITED)
        assert charge.run.name == killed.record["id"]
        charge.close()
        assert odometer(state).opened() == [charge.record]  # one charge per state directory
        records.append(charge.record)
    assert records[0]["id"] != records[1]["id"] and records[0]["event"] == records[1]["event"]
    release(records[1])  # the release of the copy is copied to the project
    desk.run("ledger write")
    assert line()["charges"] == 2 and not line()["complete"]


# ---- an earlier release as a public input


def as_public(path: str, **more) -> dict:
    run = ["count", "frequency", "classifier", "histogram", "select", "auxiliary", "synthesize"]
    return {"public": {"source": "npz", "path": path, **more}, "run": run, "select": {"ratio": 0.2}}


def test_a_ledger_deletes_no_copy_of_an_earlier_release(desk):
    """A copy of the project, with the same state directory, may still need the release."""
    first, second = charged("p"), charged("q", 6.0)
    for record in (first, second):
        release(record)
        desk.run("ledger write")
    assert (STATE / "runs" / first["id"]).is_dir()


def public_records(desk, path: str, **more) -> dict:
    """Prepare public images from `path`. Returns the records of the prepared set."""
    desk.params(**as_public(path, **more))
    desk.run("prepare public")
    return read_artifact(Path("data/public"), "public").records


def test_a_release_taken_as_public_images_brings_its_records(desk):
    record = charged("p")
    release(record)
    assert public_records(desk, "artifacts/synthesize/images.npz") == {record["id"]: record}
    # Results made from these public images have the same records, and the budget includes them
    desk.run("plan", "1 charge of earlier releases", "clinic")
    with_them = json.loads(Path("artifacts/plan/budget.json").read_text())
    assert 9.5 < with_them["epsilon"] <= 10
    desk.params(**as_public("artifacts/synthesize/images.npz"), privacy={"epsilon": 0.3})
    desk.run("plan", "must also cover the ε = ", "made from sensitive images", code=3)


def test_a_copied_release_without_privacy_json_is_recognised(desk):
    record = charged("p")
    release(record)
    desk.run("ledger write")
    released = np.load("artifacts/synthesize/images.npy")[..., 0]
    # It is also recognised in another format, and as a part of a set
    for rows in (slice(None), slice(3, 5)):
        save_set("copy.npz", np.concatenate([random_images(30), released[rows]]))
        assert public_records(desk, "copy.npz", declared_public=True) == {record["id"]: record}
    # The same file is recognised in any prepared shape
    shutil.copy("artifacts/synthesize/images.npz", "copy.npz")
    assert [found.records for found in recognised(STATE, hashes(Path("copy.npz")))] == [
        {record["id"]: record}
    ]


def test_public_images_released_unchanged_stay_public(desk):
    """The release consists of public images that were chosen privately.

    Its files carry its cost, but the public set does not.
    """
    record = charged("p")
    release(record)
    save_set("public.npz", np.load("artifacts/synthesize/images.npy")[..., 0])
    Path("data/public").mkdir(parents=True, exist_ok=True)
    shutil.copy("artifacts/synthesize/images.npy", "data/public/images.npy")
    for synthetic, expected in ((False, {}), (True, {record["id"]: record})):
        with writing(
            Path("artifacts/synthesize"), "synthesize", [read_artifact(Path("artifacts/count"))]
        ) as directory:
            for name in ("images.npy", "labels.npy"):
                shutil.copy(f"artifacts/synthesize/{name}", directory / name)
            (directory / "card.json").write_text(json.dumps({"synthetic": synthetic}))
        desk.run("ledger write")
        shutil.rmtree("data/public", ignore_errors=True)
        assert public_records(desk, "public.npz", declared_public=True) == expected


def test_the_owners_public_images_are_declared_explicitly(desk):
    save_set("mine.npz", random_images(30))
    desk.params(**as_public("mine.npz"))
    desk.run("prepare public", "public.declared_public: true", "privacy.json", code=2)
    assert public_records(desk, "mine.npz", declared_public=True) == {}


def test_a_release_whose_record_was_edited_is_no_public_input(desk):
    release(charged("p"))
    desk.run("ledger write")
    file = Path("artifacts/synthesize/privacy.json")
    content = json.loads(file.read_text())
    for record in content["records"].values():
        record["event"]["noise_multiplier"] = 500.0
    file.write_text(json.dumps(content))
    desk.params(**as_public("artifacts/synthesize/images.npz"))
    desk.run("prepare public", "was edited", code=4)


def test_a_time_of_a_clock_that_was_far_off_can_be_shown():
    assert utc(0) == "1970-01-01 00:00" and utc(10**18) == f"{10**18} s after 1970"


@pytest.mark.parametrize("entry", ["size_hint", "target", "delta", "recipe"])
def test_a_budget_of_another_shape_writes_no_ledger(desk, entry):
    path = Path("artifacts/plan/budget.json")
    for wrong in (
        json.dumps(json.loads(path.read_text()) | {entry: []}),
        "[]",
        "{",
        '{"a": ' * 1000,
        "\x00",
    ):
        path.write_text(wrong)
        desk.run("ledger write", "budget.json cannot be read", code=2)
        assert not Path("ledger.json").exists()
