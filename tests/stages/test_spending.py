"""The spending policy: what is kept, what is spent again, what a kill costs, what the dry run says."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from filelock import FileLock, Timeout

from sfumato.privacy import authorize
from sfumato.privacy.authorize import ChargeRequest
from sfumato.privacy.charge import Charge
from sfumato.privacy.odometer import Odometer
from sfumato.privacy.resolved import read_lineage
from sfumato.privacy.schema4 import table
from sfumato.settings.recipes import overlaid
from sfumato.settings.stages import STAGES
from sfumato.storage.artifacts import read_artifact
from sfumato.storage.digest import digest_of_file
from sfumato.storage.files import copy_directory
from stages import runner

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"recipe": "dp-feta", "central": {"pool": 2}, "privacy": {"epsilon": 10.0, "lifetime_epsilon": 10.0}}


def write_params(**content) -> None:
    Path("params.yaml").write_text(yaml.safe_dump(overlaid(SMALL, content)))


def opened() -> list[str]:
    lines = Path("state/odometer/digits.jsonl").read_text().splitlines()
    return [entry["record"]["stage"] for entry in map(json.loads, lines) if entry["kind"] == "open"]


def closings() -> list[str]:
    """The digest that the journal holds of each release."""
    lines = Path("state/odometer/digits.jsonl").read_text().splitlines()
    return [entry["released"] for entry in map(json.loads, lines) if entry["kind"] == "close"]


def planned(desk, *words: str) -> dict[str, str]:
    code, text = desk("plan", *words)
    assert code == 0, text
    return {path.name: path.read_text() for path in Path("artifacts/plan").glob("*.yaml")}


@pytest.fixture
def plan(desk) -> dict[str, str]:
    """The first plan, by file name; nothing is released yet."""
    write_params()
    assert desk("prepare", "sensitive")[0] == 0
    return planned(desk)


class Killed(BaseException):
    """The end of the process: nothing catches it."""


@pytest.fixture
def killed_at(desk, monkeypatch):
    """A function that runs `stage count` until it calls what has this name, as a kill would end it there."""

    def until(name: str) -> None:
        locks, init = [], Charge.__init__

        def opening(charge, *given, lock, **more):
            locks.append(lock)
            init(charge, *given, lock=lock, **more)

        def kill(*_, **__):
            raise Killed

        with monkeypatch.context() as dying:
            dying.setattr(Charge, "__init__", opening)
            dying.setattr(name, kill)
            with pytest.raises(Killed):
                desk("count")
        for lock in locks:
            lock.close()  # as the end of a process lets go of it

    return until


@pytest.fixture
def released(desk, plan):
    """`desk` after count and central were released: the first plan, by file name."""
    for stage in ("count", "central"):
        assert desk(stage)[0] == 0
    return plan


@pytest.fixture
def released_by_0_2(desk, monkeypatch, plan):
    """The same by version 0.2: resolved files with every setting and a digest of code, and records of schema 4."""
    for file in Path("artifacts/plan").glob("*.yaml"):
        content = yaml.safe_load(file.read_text())
        content.pop("revision")
        content["settings"] = {**table()["settings"].get(file.stem, {}), **content["settings"]}
        file.write_text(yaml.safe_dump(content | {"code": "c" * 64}))

    def then(**given) -> ChargeRequest:
        schema4 = read_lineage(Path("artifacts/plan"), given["stage"]).schema4
        return ChargeRequest(**{**given, "schema4": {}, "plan": schema4["plan"], "settings": schema4["settings"]})

    with monkeypatch.context() as old:
        old.setattr(authorize, "ChargeRequest", then)
        for stage in ("count", "central"):
            assert desk(stage)[0] == 0
    return {path.name: path.read_text() for path in Path("artifacts/plan").glob("*.yaml")}


def lose_nothing():
    pass


def lose_the_cache():
    shutil.rmtree("artifacts")


def clone_and_pull():
    shutil.rmtree("state")


def clone_alone():
    records = [
        next(
            r
            for r in json.loads(Path(f"artifacts/{s}/privacy.json").read_text())["records"].values()
            if r["stage"] == s
        )
        for s in ("count", "central")
    ]
    Path("ledger.json").write_text(json.dumps({"records": records}))
    shutil.rmtree("artifacts")
    shutil.rmtree("state")


LOSSES = [lose_nothing, lose_the_cache, clone_and_pull, clone_alone]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_keeps_what_was_released(desk, released, loss):
    loss()
    code, text = desk("plan", "--dry-run")
    assert code == 0 and text.count("already released as") == 2
    assert "next: `dvc repro` will spend: finetune" in text
    assert planned(desk) == released


@pytest.mark.parametrize("loss", LOSSES)
def test_an_upgrade_from_0_2_keeps_what_was_released(desk, released_by_0_2, loss):
    loss()
    code, text = desk("plan", "--dry-run")
    assert code == 0 and text.count("already released as") == 2
    assert "next: `dvc repro` will spend: finetune" in text
    now = planned(desk)
    if loss not in (lose_the_cache, clone_alone):  # there the files are gone, and with them their form
        same = {f"{name}.yaml" for name, stage in STAGES.items() if stage.revision == 1}  # others are free, and re-run
        assert {f: now[f] for f in same} == {f: released_by_0_2[f] for f in same}
    if loss is lose_nothing:
        assert desk("count")[0] == 3 and opened() == ["count", "central"]  # its own artifact lies there
        shutil.rmtree("artifacts/count")
        code, text = desk("count")
        assert code == 0 and "put back" in text and opened() == ["count", "central"]


def raise_revision(monkeypatch, name: str) -> None:
    monkeypatch.setitem(STAGES, name, replace(STAGES[name], revision=2))


@pytest.mark.parametrize("of", ["released", "released_by_0_2"])
def test_a_raised_revision_spends_again_and_says_so_first(desk, request, monkeypatch, of):
    request.getfixturevalue(of)
    raise_revision(monkeypatch, "central")
    code, text = desk("central")
    assert code == 2 and "it is of revision 1 of central, now 2" in text and "run `stage plan` again" in text
    code, text = desk("plan", "--dry-run")
    assert code == 3 and "central" in text.split("would be exceeded")[1]
    write_params(privacy={"lifetime_epsilon": "unlimited"})
    code, text = desk("plan", "--dry-run")
    assert code == 0 and "count: already released" in text and "central: would re-spend" in text
    planned(desk)
    assert desk("central")[0] == 0 and opened() == ["count", "central", "central"]


def test_a_raised_revision_reaches_the_queries_that_read_the_stage(desk, released, monkeypatch):
    raise_revision(monkeypatch, "count")  # central reads it
    write_params(privacy={"lifetime_epsilon": "unlimited"})
    text = desk("plan", "--dry-run")[1]
    assert "count: would re-spend" in text and "central: would re-spend" in text


TWO_ROUNDS = {
    "recipe": "teacher-generator",
    "run": ["count", "frequency", "auxiliary", "teacher", "synthesize"],
    "synthesize": {"sources": {"auxiliary": 1}, "count": 40},
    "frequency": {"size": 100, "features": [{"map": "pixels"}]},
    "auxiliary": {"steps": 2, "images": 60, "width": 8},
    "teacher": {"dimension": 16, "steps": 2},
}


def test_free_work_done_anew_puts_the_release_of_the_teacher_back_and_its_settings_are_said_first(desk, monkeypatch):
    write_params(**TWO_ROUNDS)
    assert desk("prepare", "sensitive")[0] == 0
    said = "auxiliary: set it before the first run: to change it afterwards spends again on teacher"
    assert said in desk("plan", "--dry-run")[1]
    planned(desk)
    for stage in ("count", "frequency", "auxiliary", "teacher"):
        code, text = desk(stage)
        assert code == 0, text
    paid, weights = opened(), digest_of_file(Path("artifacts/teacher/privacy.json"))
    raise_revision(monkeypatch, "auxiliary")
    text = desk("plan", "--dry-run")[1]
    assert "teacher: already released" in text and "next: nothing to spend" in text
    planned(desk)
    assert desk("auxiliary")[0] == 0
    with Path("artifacts/auxiliary/privacy.json").open("a") as file:
        file.write("\n")  # other bytes, as other code would give
    shutil.rmtree("artifacts/teacher")
    code, text = desk("teacher")
    assert code == 0 and "put back, nothing is charged" in text, text
    assert opened() == paid and digest_of_file(Path("artifacts/teacher/privacy.json")) == weights
    write_params(**overlaid(TWO_ROUNDS, {"auxiliary": {"steps": 3}}))
    code, text = desk("plan", "--dry-run")
    assert code == 3 and "teacher" in text.split("would be exceeded")[1]  # as was said


def test_nothing_is_put_back_beside_inputs_of_other_charges(desk, monkeypatch):
    write_params(**TWO_ROUNDS | {"run": [*TWO_ROUNDS["run"], "central"], "central": {"noise": "10%", "pool": 2}})
    assert desk("prepare", "sensitive")[0] == 0
    planned(desk)
    for stage in ("count", "frequency", "auxiliary", "teacher", "central"):
        assert desk(stage)[0] == 0
    file = Path("artifacts/auxiliary/privacy.json")
    content = json.loads(file.read_text())
    content["records"] |= json.loads(Path("artifacts/central/privacy.json").read_text())["records"]
    file.write_text(json.dumps(content))
    shutil.rmtree("artifacts/teacher")
    code, text = desk("teacher")
    assert code == 3 and "already released" in text and "put back" not in text and len(opened()) == 4, text


def test_an_edit_of_settings_is_not_kept(desk, released):
    write_params(central={"pool": 4})
    code, text = desk("plan", "--dry-run")
    assert code == 3 and "central" in text.split("would be exceeded")[1]
    write_params(central={"pool": 4}, privacy={"lifetime_epsilon": "unlimited"})
    code, text = desk("plan", "--dry-run")
    assert code == 0 and "count: already released" in text and "central: would re-spend" in text


def test_images_of_another_version_are_asked_anew(desk, released):
    write_params(data={"version": "2"}, privacy={"lifetime_epsilon": 99})
    assert desk("prepare", "sensitive")[0] == 0
    code, text = desk("plan", "--dry-run")
    assert code == 0 and "count: would re-spend" in text and "central: would re-spend" in text


@pytest.mark.parametrize("of", ["released", "released_by_0_2"])
def test_a_release_that_is_lost_is_refused_and_not_spent_again(desk, request, of):
    request.getfixturevalue(of)
    shutil.rmtree("artifacts")
    shutil.rmtree("state/runs")
    planned(desk)
    code, text = desk("count")
    assert code == 3 and "already released" in text and "spend_again: {count: 1}" in text
    assert opened() == ["count", "central"]


def test_what_is_named_in_spend_again_runs_anew_once_with_what_depends_on_it(desk, released):
    write_params(privacy={"spend_again": ["count"], "lifetime_epsilon": 99})
    code, text = desk("plan", "--dry-run")
    assert code == 0 and "count: would re-spend" in text and "central: would re-spend" in text
    anew = planned(desk)
    assert all(anew[f"{s}.yaml"] != released[f"{s}.yaml"] for s in ("count", "central"))
    assert planned(desk) == anew  # the wish is the same until it is granted
    for stage in ("count", "central"):
        assert desk(stage)[0] == 0
    assert opened() == ["count", "central"] * 2
    assert planned(desk) == anew  # granted: the key may stay
    code, text = desk("plan", "--dry-run")
    assert "count was paid for again; privacy.spend_again: {count: 2} would pay once more" in text
    lost = Path("artifacts/plan").rename("elsewhere")  # the wish is compared with the odometer, not with the last plan
    assert planned(desk) == anew and lost.is_dir()
    assert desk("count")[0] == 3
    write_params(privacy={"lifetime_epsilon": 99})
    now = planned(desk)  # and may go: the later releases are kept
    assert all(now[f"{s}.yaml"] == anew[f"{s}.yaml"] for s in ("count", "central"))
    write_params(privacy={"spend_again": {"central": 2}, "lifetime_epsilon": 99})
    third = planned(desk)
    assert third["central.yaml"] != anew["central.yaml"] and third["count.yaml"] == anew["count.yaml"]


@pytest.mark.parametrize(
    ("value", "words"),
    [(True, "how often to pay for each again"), (["pretrain"], "'pretrain', which is not a query"), (["x"], "'x'")],
)
def test_spend_again_names_queries(desk, value, words):
    write_params(privacy={"spend_again": value})
    code, text = desk("prepare", "sensitive")
    assert code == 2 and words in text


MOMENTS = {
    "in the query": ("stages.count.query_count", False),
    "while it is written": ("stages.count.save_counts", False),
    "before it is journalled": ("sfumato.privacy.charge.Charge.close", True),
    "before it is taken over": ("stages.runner.copy_directory", True),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_costs_nothing_at_any_moment(desk, plan, killed_at, moment):
    name, on_disk = MOMENTS[moment]
    killed_at(name)
    assert opened() == ["count"] and not Path("artifacts/count").exists()
    runs = list(Path("state/runs").glob("*/released/counts.json"))
    assert bool(runs) == on_disk
    before = [path.read_text() for path in runs]
    code, text = desk("count")
    assert code == 0 and ("put back" in text) == on_disk
    assert opened() == ["count"] and [Path("artifacts/count/counts.json").read_text()] == (before or [ANY])
    assert closings() == [digest_of_file(Path("artifacts/count/privacy.json"))]
    assert desk("count")[0] == 3 and "1 charge," in desk("ledger", "history")[1]
    assert not list(Path("state/runs").rglob("*.tmp")) and not list(Path("artifacts").rglob("*.tmp"))


def withdraw(desk, monkeypatch) -> None:
    """The same source without its class 3, under the same data.version."""
    from sfumato.data import prepare

    def without(data, raw):
        source = read_source(data, raw)
        kept = [example for example in source.train if example[1] != 3]
        return replace(source, train=kept)

    read_source = prepare.read_source
    monkeypatch.setattr(prepare, "read_source", without)
    shutil.rmtree("data/sensitive")
    assert desk("prepare", "sensitive")[0] == 0


def test_an_open_charge_does_not_go_on_with_other_images(desk, monkeypatch, plan, killed_at):
    killed_at("stages.count.query_count")
    before = Path("data/sensitive/card.json").read_bytes()
    with monkeypatch.context() as context:
        withdraw(desk, context)
        assert Path("data/sensitive/card.json").read_bytes() == before  # it does not tell
        code, text = desk("count")
    assert code == 3 and "was opened on other images" in text and "spend_again: {count: 1}" in text
    assert opened() == ["count"] and not Path("artifacts/count").exists()
    assert desk("prepare", "sensitive")[0] == 0 and desk("count")[0] == 0  # as they were
    assert opened() == ["count"]


def test_a_release_that_is_put_back_says_that_the_images_have_changed_since(desk, released, monkeypatch):
    shutil.rmtree("artifacts/count")
    code, text = desk("count")
    assert code == 0 and "put back" in text and "changed" not in text
    shutil.rmtree("artifacts/count")
    withdraw(desk, monkeypatch)
    code, text = desk("count")
    assert code == 0 and "put back" in text and "images have changed since" in text
    private = Path("state/data/digits/fingerprint").read_text()
    shown = [path for path in Path().rglob("*") if path.is_file() and "state" not in path.parts]
    assert not any(private.encode() in path.read_bytes() for path in shown)
    journal = Path("state/odometer/digits.jsonl")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert all("images" not in entry.get("record", {}) for entry in lines)


def with_another_count(kept: Path) -> None:
    """As someone would who knows the form: the hash in `privacy.json` fits."""
    (kept / "counts.json").write_text('{"counts": [1]}')
    content = json.loads((kept / "privacy.json").read_text())
    content["files"]["counts.json"] = digest_of_file(kept / "counts.json")
    (kept / "privacy.json").write_text(json.dumps(content))


def linked(path: Path) -> None:
    elsewhere = path.rename(Path(path.name + ".elsewhere").absolute())
    path.symlink_to(elsewhere)


CHANGES = {
    "a file": lambda kept: (kept / "counts.json").write_text("{}"),
    "a file and its hash": with_another_count,
    "no privacy.json": lambda kept: (kept / "privacy.json").unlink(),
    "a file too many": lambda kept: (kept / "more").write_text(""),
    "a linked file": lambda kept: linked(kept / "counts.json"),
    "a linked copy": linked,
    "a linked run": lambda kept: linked(kept.parent),
    "a link to nowhere": lambda kept: (shutil.rmtree(kept), kept.symlink_to("nowhere")),
    "a file for a folder": lambda kept: (shutil.rmtree(kept), kept.write_text("")),
}


@pytest.mark.parametrize("journalled", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_kept_copy_that_was_changed_is_not_put_back(desk, plan, killed_at, change, journalled):
    killed_at("stages.runner.copy_directory" if journalled else "sfumato.privacy.charge.Charge.close")
    if not journalled and change in ("a file and its hash", "a link to nowhere"):
        return  # nothing says what it was; nothing is there
    (kept,) = Path("state/runs").glob("*/released")
    CHANGES[change](kept)
    code, text = desk("count")
    assert code == 4 and "Two ways on: restore it" in text and "spend_again: {count: 1}" in text
    assert not Path("artifacts/count").exists() and opened() == ["count"]
    assert len(closings()) == journalled  # nothing is closed over a copy that is not whole


def test_a_release_is_copied_by_one_process_at_a_time(desk, monkeypatch, plan):
    """Who finds it released while another copies it waits, and DVC then finds an artifact."""
    copied = []

    def copy(kept, out):
        with pytest.raises(Timeout):
            FileLock(kept.with_name(runner.COPYING)).acquire(blocking=False)
        copied.append(out)
        copy_directory(kept, out)

    monkeypatch.setattr(runner, "copy_directory", copy)
    assert desk("count")[0] == 0
    shutil.rmtree("artifacts/count")
    code, text = desk("count")
    assert code == 0 and "put back" in text and len(copied) == 2


def test_a_copy_whose_journal_is_older_than_its_digest_is_put_back(desk, released, monkeypatch):
    charges = Odometer.charges
    older = lambda *asked: [replace(run, released=None) for run in charges(*asked)]  # noqa: E731
    monkeypatch.setattr(Odometer, "charges", older)
    shutil.rmtree("artifacts/count")
    code, text = desk("count")
    assert code == 0 and "put back" in text


def test_what_a_process_left_behind_put_there_after_dvc_removed_it_is_no_failure(desk, released, monkeypatch):
    """DVC was killed, its stage was not: the stage ends while the next one starts."""
    assert desk("count")[0] == 3
    monkeypatch.setenv("DVC_STAGE", "count")
    code, text = desk("count")
    assert code == 0 and "put back, nothing is charged" in text and opened() == ["count", "central"]


class Anything:
    def __eq__(self, other):
        return True


ANY = Anything()


def test_nothing_is_outside_the_private_directory_while_a_charge_is_open(desk, monkeypatch, plan):
    """What makes a second draw free: the release of an open charge lies in the state directory alone."""
    seen, close = [], Charge.close

    def closing(charge, *digest):
        outside = [path for path in Path("artifacts").rglob("*") if "plan" not in path.parts and path.is_file()]
        seen.append((outside, (charge.run / "released" / "privacy.json").exists(), charge.run.stat().st_mode & 0o077))
        close(charge, *digest)

    monkeypatch.setattr(Charge, "close", closing)
    for stage in ("count", "central"):
        assert desk(stage)[0] == 0
        seen[-1] = ([path for path in seen[-1][0] if stage in path.parts], *seen[-1][1:])
    assert seen == [([], True, 0)] * 2


def test_an_older_artifact_gives_way_to_a_release_that_was_not_taken_over(desk, released, killed_at):
    write_params(count={"noise": "1%"}, privacy={"lifetime_epsilon": 99})
    planned(desk)
    killed_at("stages.runner.copy_directory")
    code, text = desk("count")
    assert code == 0 and "put back" in text
    record = json.loads(Path("artifacts/count/privacy.json").read_text())["records"]
    assert opened() == ["count", "central", "count"] and len(record) == 1


def test_a_plan_for_more_steps_spends_on_finetune_alone_or_is_refused_with_the_ways_on(desk, released):
    """As `dvc exp run -S finetune.steps=30` on a finished run."""
    write_params(finetune={"steps": 3, "batch": 100, "draws": 1}, pretrain={"steps": 5}, model={"width": 8})
    planned(desk)
    for stage in STAGES:
        if stage not in ("synthesize", "evaluate", "count", "central"):
            assert desk(stage)[0] == 0, stage
    assert opened() == ["count", "central", "finetune"]
    more = {"finetune": {"steps": 5, "batch": 100, "draws": 1}, "pretrain": {"steps": 5}, "model": {"width": 8}}
    write_params(**more)
    code, text = desk("plan", "--dry-run")
    assert code == 3 and "privacy.lifetime_epsilon=10 of dataset 'digits' would be exceeded" in text
    assert (
        "keep the old release" in text
        and "raise privacy.lifetime_epsilon to" in text
        and "finetune" in text.split("is spent")[1]
    )
    assert desk("finetune")[0] == 3 and opened() == ["count", "central", "finetune"]
    write_params(**overlaid(more, {"privacy": {"lifetime_epsilon": "unlimited"}}))
    code, text = desk("plan", "--dry-run")
    assert code == 0 and "count: already released" in text and "central: already released" in text
    assert "next: `dvc repro` will spend: finetune (ε = " in text
    planned(desk)
    assert desk("finetune")[0] == 0
    assert opened() == ["count", "central", "finetune", "finetune"]
    assert "next: nothing to spend: `dvc repro`" in desk("plan", "--dry-run")[1].splitlines()


def test_a_stage_that_is_killed_again_and_again_opens_one_charge(desk, plan):
    """A short form of benchmarks/kills.py: real processes, ended by SIGKILL at three moments."""
    journal, runs = Path("state/odometer/digits.jsonl"), Path("state/runs")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for reached in (journal.exists, lambda: any(runs.glob("*/.released.*")), lambda: any(runs.glob("*/released"))):
        process = subprocess.Popen(
            [sys.executable, "-m", "stages.cli", "count"], env=environment, start_new_session=True
        )
        while process.poll() is None and not reached():
            time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if Path("artifacts/count").exists():
            break  # it was faster than the last kill
    else:
        assert desk("count")[0] == 0
    assert opened() == ["count"]
    artifact = read_artifact(Path("artifacts/count"), "count")
    assert [record["stage"] for record in artifact.records.values()] == ["count"]
    assert not list(runs.rglob("*.tmp")) and not list(Path("artifacts").glob(".*.tmp"))
