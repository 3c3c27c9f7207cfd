"""Ledger, plan and journal as the data owner meets them: `stage ledger write|adopt|history`, `stage plan`."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from sfumato.data.images import ImageSet, save_images
from sfumato.data.store import read_card
from sfumato.privacy.authorize import ChargeRequest, SpendingPolicy, open_charge
from sfumato.privacy.events import Mechanism
from sfumato.privacy.ledger import read_ledger
from sfumato.privacy.odometer import Odometer
from sfumato.settings.stages import QUERIES
from sfumato.storage.artifacts import read_artifact, write_empty, writing
from stages.cli import main
from stages.ledger import artifact_problems

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


class Desk:
    """An owner's project in the current folder: prepared images, a state directory, charges, a release."""

    state, card = Path("state"), Path("data/sensitive/card.json")

    def __init__(self, capsys, monkeypatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, *words: str) -> tuple[int, str]:
        self.monkeypatch.setattr(sys, "argv", ["stage", *words])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        output = self.capsys.readouterr()
        text = " ".join((output.out + output.err).split())
        assert "Traceback" not in text
        return code, text

    @property
    def odometer(self) -> Odometer:
        return Odometer(self.state.absolute(), "clinic")

    def charge(self, plan: str, noise: float = 5.0) -> dict:
        """A count that was opened and closed. Returns its record."""
        work = ChargeRequest(
            stage="count",
            plan=plan,
            settings=plan,
            mechanism=Mechanism(noise_multiplier=noise),
            max_norm=1.0,
            released="x",
            sensitivity="1",
        )
        permission = SpendingPolicy(delta=1e-5, lifetime_epsilon="unlimited")
        charge = open_charge(self.state.absolute(), read_card(self.card), work, permission)
        charge.close()
        return charge.record

    def release(self, *records: dict) -> None:
        """Artifacts as `dvc repro`, or DVC's cache, leaves them."""
        for name in QUERIES:
            shutil.rmtree(f"artifacts/{name}", ignore_errors=True)
            write_empty(Path("artifacts") / name, name)
        shutil.rmtree("artifacts/count")
        with writing(Path("artifacts/count"), "count", records=records):
            pass
        with writing(Path("artifacts/synthesize"), "synthesize", [read_artifact(Path("artifacts/count"))]) as directory:
            images = np.random.default_rng(3).integers(0, 256, (20, 8, 8, 1)).astype(np.uint8)
            save_images(directory, ImageSet(images, np.arange(20) % 2, ("a", "b")))
            np.savez(directory / "images.npz", images=images, labels=np.arange(20) % 2, classes=np.array(["a", "b"]))

    def params(self, **more) -> None:
        Path("params.yaml").write_text(yaml.safe_dump(PARAMS | more))

    def line(self) -> dict:
        return json.loads(Path("ledger.json").read_text())["odometer"]


@pytest.fixture
def desk(tmp_path, monkeypatch, capsys) -> Desk:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SFUMATO_STATE", str(tmp_path / "state"))
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    np.savez("real.npz", images=images, labels=np.arange(60) % 2, classes=np.array(["a", "b"]))
    Path("pipelines").mkdir()
    Path("pipelines/one.yaml").write_text("description: one\n")
    desk = Desk(capsys, monkeypatch)
    desk.params()
    assert desk("prepare", "sensitive")[0] == 0 and desk("prepare", "public")[0] == 0
    Path("artifacts/plan").mkdir(parents=True)
    Path("artifacts/plan/budget.json").write_text(json.dumps(BUDGET))
    return desk


def test_the_ledger_holds_the_head_of_the_journal_and_every_charge(desk):
    desk.charge("aborted")
    desk.release(desk.charge("p"))
    text = desk.run("ledger write")
    assert "incomplete" not in text
    assert desk.line()["charges"] == 2 and desk.line()["complete"] and desk.line()["head"] == desk.odometer.head()
    assert desk("ledger", "check")[0] == 0
    assert "2 charges" in (text := desk("ledger", "show")[1]) and "at least" not in text


def test_a_lock_may_name_a_stage_that_an_earlier_version_had(desk):
    """DVC keeps the entries of stages that are gone; an artifact of a stage of today must be there."""
    desk.release(desk.charge("p"))
    assert desk("ledger", "write")[0] == 0

    def problems(stage: str) -> list[str]:
        outs = [{"path": f"artifacts/{stage}", "md5": "a.dir"}]
        Path("dvc.lock").write_text(yaml.safe_dump({"stages": {stage: {"outs": outs}}}))
        return artifact_problems(read_ledger(Path("ledger.json")), Path("artifacts"), Path("dvc.lock"))

    missing = "artifacts/{} is not an artifact"
    assert not any(missing.format("denoiser") in problem for problem in problems("denoiser"))
    assert any(missing.format("classifier") in problem for problem in problems("classifier"))


def test_a_ledger_that_does_not_hold_is_not_written(desk):
    desk.release(desk.charge("p", noise=0.5))  # ε = 10 is far below what it cost
    desk.run("ledger write", "exceeds its own target", code=3)
    assert not Path("ledger.json").exists()


def test_a_ledger_beside_an_empty_state_directory_counts_the_release_and_says_that_it_is_incomplete(desk, monkeypatch):
    desk.charge("aborted")
    desk.release(desk.charge("p"))
    monkeypatch.setenv("SFUMATO_STATE", str(Path("elsewhere").absolute()))
    desk.run("ledger write", "incomplete", "never begun")
    assert desk.line()["charges"] == 1 and desk.line()["epsilon"] > 0 and not desk.line()["complete"]
    assert desk("ledger", "check")[0] == 0 and "at least 1 charge," in desk("ledger", "show")[1]


@pytest.mark.parametrize("lost", ["older", "deleted", "cut"])
def test_a_journal_that_does_not_fit_the_ledger_refuses_with_the_way_out(desk, lost):
    """An older copy of the whole state directory, say: it fits by itself, and forgets what the ledger names."""
    first = desk.charge("p")
    shutil.copytree("state", "copy")
    second = desk.charge("q")
    desk.release(first, second)
    assert desk("ledger", "write")[0] == 0
    if lost == "older":
        shutil.rmtree("state")
        shutil.move("copy", "state")
    elif lost == "deleted":
        shutil.rmtree("state")
        assert desk("prepare", "sensitive")[0] == 0  # all that an empty state directory needs
    else:
        path = desk.odometer.path
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    for words in (("plan",), ("plan", "--dry-run")):
        desk.run(f"{' '.join(words)}", "stage ledger adopt", code=3)
    desk.run("ledger write", "incomplete")
    assert desk.line()["charges"] == 2 and not desk.line()["complete"]
    desk.run("ledger adopt", "2 counted in all")
    assert desk("plan")[0] == 0
    assert len(desk.odometer.opened()) == 2 and not desk.odometer.complete()
    desk.run("ledger history", "2 charges", "incomplete")
    assert desk("ledger", "write")[0] == 0 and desk.line()["charges"] == 2 and not desk.line()["complete"]


def test_a_copied_state_directory_continues_under_another_id_and_both_are_counted(desk):
    """Two continuations of one run left one id: together they were charged once."""
    work = ChargeRequest(
        stage="finetune",
        plan="p",
        settings="p",
        mechanism=Mechanism(noise_multiplier=2.0, sample_rate=0.5, uses=4),
        max_norm=1.0,
        released="x",
        sensitivity="1",
    )
    card, permission = read_card(desk.card), SpendingPolicy(delta=1e-5, lifetime_epsilon="unlimited")
    killed = open_charge(desk.state.absolute(), card, work, permission)
    killed._lock.close()
    shutil.copytree("state", "copy")
    records = []
    for state in ("state", "copy"):
        charge = open_charge(Path(state).absolute(), card, work, permission)
        assert charge.run.name == killed.record["id"]
        charge.close()
        assert Odometer(Path(state).absolute(), "clinic").opened() == [charge.record]  # once in one place
        records.append(charge.record)
    assert records[0]["id"] != records[1]["id"] and records[0]["event"] == records[1]["event"]
    desk.release(records[1])  # the other continuation's release comes to this place
    assert desk("ledger", "write")[0] == 0
    assert desk.line()["charges"] == 2 and not desk.line()["complete"]


# ---- an earlier release as a public input


def as_public(source: str, path: str, **more) -> dict:
    run = ["count", "frequency", "classifier", "histogram", "select", "auxiliary", "synthesize"]
    return {"public": {"source": source, "path": path, **more}, "run": run, "select": {"ratio": 0.2}}


def test_a_release_taken_as_public_images_brings_its_records(desk):
    record = desk.charge("p")
    desk.release(record)
    desk.params(**as_public("npz", "artifacts/synthesize/images.npz"))
    assert desk("prepare", "public")[0] == 0
    public = read_artifact(Path("data/public"), "public")
    assert public.records == {record["id"]: record}
    # so what is made of it has them too, and the budget leaves room for them
    desk.run("plan", "1 charge of an earlier release", "clinic")
    with_them = json.loads(Path("artifacts/plan/budget.json").read_text())
    assert 9.5 < with_them["epsilon"] <= 10
    desk.params(**as_public("npz", "artifacts/synthesize/images.npz"), privacy={"size_hint": 1000, "epsilon": 0.3})
    desk.run("plan", "made from sensitive images", "alone", code=3)


def test_a_copy_of_a_release_without_its_privacy_json_is_recognised(desk):
    record = desk.charge("p")
    desk.release(record)
    assert desk("ledger", "write")[0] == 0
    release = np.load("artifacts/synthesize/images.npy")
    for rows in (slice(None), slice(3, 5)):  # also where it was put into another format, or is a part of a set
        other = np.random.default_rng(9).integers(0, 256, (30, 8, 8), dtype=np.uint8)
        mixed = np.concatenate([other, release[rows, :, :, 0]])
        np.savez("copy.npz", images=mixed, labels=np.arange(len(mixed)) % 2, classes=np.array(["x", "y"]))
        desk.params(**as_public("npz", "copy.npz", declared_public=True))
        assert desk("prepare", "public")[0] == 0
        assert read_artifact(Path("data/public"), "public").records == {record["id"]: record}
    shutil.copy("artifacts/synthesize/images.npz", "copy.npz")  # the very file, whatever shape it is prepared in
    from sfumato.data.lineage import hashes, recognised

    assert [found.records for found in recognised(Path("state"), hashes(Path("copy.npz")))] == [{record["id"]: record}]


def test_public_images_that_were_released_as_they_are_stay_public(desk):
    """A release of public images that were privately chosen: its files carry its cost, the public set does not."""
    record = desk.charge("p")
    desk.release(record)
    Path("data/public").mkdir(parents=True, exist_ok=True)
    shutil.copy("artifacts/synthesize/images.npy", "data/public/images.npy")
    for synthetic, expected in ((False, {}), (True, {record["id"]: record})):
        with writing(Path("artifacts/synthesize"), "synthesize", [read_artifact(Path("artifacts/count"))]) as directory:
            for name in ("images.npy", "labels.npy"):
                shutil.copy(f"artifacts/synthesize/{name}", directory / name)
            (directory / "card.json").write_text(json.dumps({"synthetic": synthetic}))
        assert desk("ledger", "write")[0] == 0
        shutil.rmtree("data/public", ignore_errors=True)
        images = np.load("artifacts/synthesize/images.npy")[..., 0]
        np.savez("public.npz", images=images, labels=np.arange(20) % 2, classes=np.array(["x", "y"]))
        desk.params(**as_public("npz", "public.npz", declared_public=True))
        assert desk("prepare", "public")[0] == 0
        assert read_artifact(Path("data/public"), "public").records == expected


def test_public_images_of_the_owner_s_are_declared_to_be_public_in_so_many_words(desk):
    images = np.random.default_rng(9).integers(0, 256, (30, 8, 8), dtype=np.uint8)
    np.savez("mine.npz", images=images, labels=np.arange(30) % 2, classes=np.array(["x", "y"]))
    desk.params(**as_public("npz", "mine.npz"))
    desk.run("prepare public", "public.declared_public: true", "privacy.json", code=2)
    desk.params(**as_public("npz", "mine.npz", declared_public=True))
    assert desk("prepare", "public")[0] == 0
    assert read_artifact(Path("data/public"), "public").records == {}


def test_a_release_whose_record_was_edited_is_no_public_input(desk):
    desk.release(desk.charge("p"))
    assert desk("ledger", "write")[0] == 0
    file = Path("artifacts/synthesize/privacy.json")
    content = json.loads(file.read_text())
    for record in content["records"].values():
        record["event"]["noise_multiplier"] = 500.0
    file.write_text(json.dumps(content))
    desk.params(**as_public("npz", "artifacts/synthesize/images.npz"))
    desk.run("prepare public", "was edited", code=4)
