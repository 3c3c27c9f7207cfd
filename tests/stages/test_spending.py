"""The spending policy: what is kept, what is spent again, what a kill costs, and what the dry run
shows.
"""

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

from sfumato.data import prepare
from sfumato.privacy.charge import Charge
from sfumato.privacy.odometer import Odometer
from sfumato.settings.recipes import overlaid
from sfumato.settings.stages import STAGES
from sfumato.storage.artifacts import read_artifact
from sfumato.storage.digest import digest_of_file, md5_of
from sfumato.storage.files import copy_directory
from stages import runner

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "recipe": "dp-feta",
    "central": {"repeats": 2},
    "privacy": {"epsilon": 10.0, "lifetime_epsilon": 10.0},
}


def closings(desk) -> list[str]:
    """Return the digest of each release in the journal."""
    return [entry["released"] for entry in desk.journal if entry["kind"] == "close"]


def planned(desk) -> dict[str, str]:
    desk.run("plan")
    return {path.name: path.read_text() for path in Path("artifacts/plan").glob("*.yaml")}


@pytest.fixture
def desk(desk):
    """Prepare the digits."""
    desk.base = SMALL
    desk.params()
    desk.run("prepare sensitive")
    return desk


@pytest.fixture
def plan(desk) -> dict[str, str]:
    """Return the first plan, by file name; nothing is released yet."""
    return planned(desk)


@pytest.fixture
def released(desk, plan):
    """Release count and central. Returns the first plan, by file name."""
    desk.run_all("count", "central")
    return plan


def clone_alone():
    records = []
    for name in ("count", "central"):
        own = json.loads(Path(f"artifacts/{name}/privacy.json").read_text())["records"].values()
        records += [record for record in own if record["stage"] == name]
    Path("ledger.json").write_text(json.dumps({"records": records}))
    shutil.rmtree("artifacts")
    shutil.rmtree("state")


LOSSES = {
    "nothing": lambda: None,
    "cache": lambda: shutil.rmtree("artifacts"),
    "clone and pull": lambda: shutil.rmtree("state"),
    "clone alone": clone_alone,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_keeps_what_was_released(desk, released, loss):
    LOSSES[loss]()
    text = desk.run("plan --dry-run", "next: `stage run` will spend: finetune")
    assert text.count("already released as") == 2
    assert ("Restore the artifact" in text) == (loss == "clone alone")
    assert planned(desk) == released
    if loss == "nothing":
        paid = Path("artifacts/count/privacy.json").read_bytes()
        # The stage's own artifact exists
        text = desk.run("count", "already released", "A copy is kept", code=3)
        assert "spend_again" not in text  # no advice to pay if there is a copy
        assert Path("artifacts/count/privacy.json").read_bytes() == paid
        shutil.rmtree("artifacts/count")
        desk.run("count", "restored, nothing")
        assert desk.opened == ["count", "central"]


def raise_revision(monkeypatch, name: str) -> None:
    monkeypatch.setitem(STAGES, name, replace(STAGES[name], revision=2))


CHANGES_OF_A_PLAN = {
    "revision of central": (lambda patch: raise_revision(patch, "central"), {}, ["central"]),
    # Central reads the count
    "revision of count": (lambda patch: raise_revision(patch, "count"), {}, ["count", "central"]),
    "settings": (lambda _: None, {"central": {"repeats": 3}}, ["central"]),
    "version of the images": (lambda _: None, {"data": {"version": "2"}}, ["count", "central"]),
}


@pytest.mark.parametrize("change", CHANGES_OF_A_PLAN)
def test_a_change_spends_again_with_what_reads_it(desk, released, monkeypatch, change):
    apply, content, spent = CHANGES_OF_A_PLAN[change]
    apply(monkeypatch)
    desk.params(**content)
    desk.run("prepare sensitive")
    if change == "revision of central":
        desk.run(
            "central",
            "written for revision 1 of central, and the current revision is 2",
            "run `stage plan` again",
            code=2,
        )
    over = "privacy.lifetime_epsilon=10 of dataset 'digits' would be exceeded"
    text = desk.run(
        "plan --dry-run", over, "Keep the old release", "raise privacy.lifetime_epsilon to", code=3
    )
    assert "central" in text.split("would be exceeded")[1]
    desk.params(**content, privacy={"lifetime_epsilon": "unlimited"})
    first = "would again spend" if "count" in spent else "already released"
    desk.run("plan --dry-run", f"count: {first}", "central: would again spend")
    planned(desk)
    desk.run_all(*spent)
    assert desk.opened == ["count", "central", *spent]


TWO_ROUNDS = {
    "recipe": "teacher-generator",
    "run": ["count", "frequency", "auxiliary", "teacher", "synthesize"],
    "synthesize": {"sources": {"auxiliary": 1}, "count": 40},
    "frequency": {"size": 100, "features": [{"map": "pixels"}]},
    "auxiliary": {"steps": 2, "images": 60, "width": 8},
    "teacher": {"dimension": 16, "steps": 2},
}


def test_repeated_free_work_restores_the_teachers_release(desk, monkeypatch):
    desk.params(**TWO_ROUNDS)
    warning = (
        "choose the settings of auxiliary before the first run. If you change them later, these "
        "queries spend again: teacher"
    )
    desk.run("plan --dry-run", warning)
    desk.run_all("plan", "count", "frequency", "auxiliary", "teacher")
    paid = desk.opened
    weights = digest_of_file(Path("artifacts/teacher/privacy.json"))
    raise_revision(monkeypatch, "auxiliary")
    desk.run("plan --dry-run", "teacher: already released", "which spends nothing")
    desk.run_all("plan", "auxiliary")
    with Path("artifacts/auxiliary/privacy.json").open("a") as file:
        file.write("\n")  # other bytes, as other code would give
    shutil.rmtree("artifacts/teacher")
    desk.run("teacher", "restored, nothing is charged")
    assert desk.opened == paid and digest_of_file(Path("artifacts/teacher/privacy.json")) == weights
    desk.params(**overlaid(TWO_ROUNDS, {"auxiliary": {"steps": 3}}))
    text = desk.run("plan --dry-run", code=3)
    assert "teacher" in text.split("would be exceeded")[1]  # the query that would exceed the budget


def test_nothing_is_put_back_beside_inputs_of_other_charges(desk):
    desk.params(
        **TWO_ROUNDS
        | {"run": [*TWO_ROUNDS["run"], "central"], "central": {"noise": "10%", "repeats": 2}}
    )
    desk.run_all("plan", "count", "frequency", "auxiliary", "teacher", "central")
    file = Path("artifacts/auxiliary/privacy.json")
    content = json.loads(file.read_text())
    content["records"] |= json.loads(Path("artifacts/central/privacy.json").read_text())["records"]
    file.write_text(json.dumps(content))
    shutil.rmtree("artifacts/teacher")
    assert (
        "restored, nothing" not in desk.run("teacher", "already released", code=3)
        and len(desk.opened) == 4
    )


def test_a_release_that_is_lost_is_refused_and_not_spent_again(desk, released):
    shutil.rmtree("artifacts")
    shutil.rmtree("state/runs")
    planned(desk)
    desk.run("count", "already released", "spend_again: {count: 1}", code=3)
    assert desk.opened == ["count", "central"]


def test_a_stage_in_spend_again_and_its_users_run_once(desk, released):
    desk.params(privacy={"spend_again": ["count"], "lifetime_epsilon": 99})
    desk.run("plan --dry-run", "count: would again spend", "central: would again spend")
    anew = planned(desk)
    assert all(anew[f"{s}.yaml"] != released[f"{s}.yaml"] for s in ("count", "central"))
    assert planned(desk) == anew  # the plan stays the same until it has run
    desk.run_all("count", "central")
    assert desk.opened == ["count", "central"] * 2
    assert planned(desk) == anew  # the fulfilled request may stay in the settings
    desk.run(
        "plan --dry-run",
        "privacy.spend_again was already applied to: count. To pay once more, set "
        "privacy.spend_again: {count: 2}",
    )
    # The request is compared with the odometer, not with the last plan
    lost = Path("artifacts/plan").rename("elsewhere")
    assert planned(desk) == anew and lost.is_dir()
    desk.run("count", code=3)
    desk.params(privacy={"lifetime_epsilon": 99})
    now = planned(desk)  # without the key, the repeated releases are kept
    assert all(now[f"{s}.yaml"] == anew[f"{s}.yaml"] for s in ("count", "central"))
    desk.params(privacy={"spend_again": {"central": 2}, "lifetime_epsilon": 99})
    third = planned(desk)
    assert (
        third["central.yaml"] != anew["central.yaml"] and third["count.yaml"] == anew["count.yaml"]
    )


MOMENTS = {
    "in the query": ("sfumato.queries.count.query_count", False),
    "while it is written": ("sfumato.queries.count.save_counts", False),
    "before it is journalled": ("sfumato.privacy.charge.Charge.close", True),
    "before it is taken over": ("stages.runner.copy_directory", True),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_costs_nothing_at_any_moment(desk, plan, killed_at, moment):
    name, on_disk = MOMENTS[moment]
    killed_at("count", name)
    assert desk.opened == ["count"] and not Path("artifacts/count").exists()
    runs = list(Path("state/runs").glob("*/released/counts.json"))
    assert bool(runs) == on_disk
    before = [path.read_text() for path in runs]
    assert all(
        folder.stat().st_mode & 0o077 == 0
        for path in runs
        for folder in (path.parents[1], path.parents[2])
    )
    assert ("restored, nothing" in desk.run("count")) == on_disk
    assert desk.opened == ["count"]
    assert not before or before == [Path("artifacts/count/counts.json").read_text()]
    assert closings(desk) == [digest_of_file(Path("artifacts/count/privacy.json"))]
    desk.run("count", code=3)
    desk.run("ledger history", "1 charge,")
    assert not list(Path("state/runs").rglob("*.tmp")) and not list(
        Path("artifacts").rglob("*.tmp")
    )


def withdraw(desk, monkeypatch) -> None:
    """Prepare the same source without class 3, under the same data.version."""

    def without(data, raw):
        source = read_source(data, raw)
        return replace(source, train=[example for example in source.train if example[1] != 3])

    read_source = prepare.read_source
    monkeypatch.setattr(prepare, "read_source", without)
    shutil.rmtree("data/sensitive")
    desk.run("prepare sensitive")


def test_an_open_charge_does_not_go_on_with_other_images(desk, monkeypatch, plan, killed_at):
    killed_at("count", "sfumato.queries.count.query_count")
    before = Path("data/sensitive/card.json").read_bytes()
    with monkeypatch.context() as context:
        withdraw(desk, context)
        assert Path("data/sensitive/card.json").read_bytes() == before  # the card hides the change
        desk.run("count", "was started on images that differ", "spend_again: {count: 1}", code=4)
    assert desk.opened == ["count"] and not Path("artifacts/count").exists()
    desk.run_all("prepare sensitive", "count")  # the same images
    assert desk.opened == ["count"]


def test_a_restored_release_states_that_images_changed(desk, released, monkeypatch):
    shutil.rmtree("artifacts/count")
    assert "changed" not in desk.run("count", "restored, nothing")
    shutil.rmtree("artifacts/count")
    withdraw(desk, monkeypatch)
    assert "changed" not in desk.run("count", "restored, nothing")  # a log does not reveal a change
    shutil.rmtree("artifacts/count")
    desk.terminal = True
    desk.run("count", "restored, nothing", "images have changed since")
    private = Path("state/data/digits/fingerprint").read_text()
    shown = [path for path in Path().rglob("*") if path.is_file() and "state" not in path.parts]
    assert not any(private.encode() in path.read_bytes() for path in shown)
    assert all("images" not in entry.get("record", {}) for entry in desk.journal)


def with_another_count(kept: Path) -> None:
    """Forge a count like an attacker who understands the format: the hash in `privacy.json`
    matches.
    """
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
    killed_at(
        "count",
        "stages.runner.copy_directory" if journalled else "sfumato.privacy.charge.Charge.close",
    )
    if not journalled and change in ("a file and its hash", "a link to nowhere"):
        return  # no journal entry records the hash, or no copy exists
    (kept,) = Path("state/runs").glob("*/released")
    CHANGES[change](kept)
    desk.run("count", "You can restore this copy", "spend_again: {count: 1}", code=4)
    assert not Path("artifacts/count").exists() and desk.opened == ["count"]
    assert len(closings(desk)) == journalled  # a damaged copy closes no charge


def test_a_release_is_copied_by_one_process_at_a_time(desk, monkeypatch, plan):
    """A second process waits until the copy is complete, so that DVC finds a complete artifact."""
    copied = []

    def copy(kept, out):
        with pytest.raises(Timeout):
            FileLock(kept.with_name(runner.COPYING)).acquire(blocking=False)
        copied.append(out)
        copy_directory(kept, out)

    monkeypatch.setattr(runner, "copy_directory", copy)
    desk.run("count")
    shutil.rmtree("artifacts/count")
    desk.run("count", "restored, nothing")
    assert len(copied) == 2


def test_a_copy_with_a_journal_older_than_its_digest_restores(desk, released, monkeypatch):
    charges = Odometer.charges
    monkeypatch.setattr(
        Odometer, "charges", lambda *asked: [replace(run, released=None) for run in charges(*asked)]
    )
    shutil.rmtree("artifacts/count")
    desk.run("count", "restored, nothing")


def test_leftovers_restored_after_dvc_removed_them_are_fine(desk, released, environment):
    """An earlier DVC was killed, but its stage kept running.

    The stage wrote the artifact after the next DVC had removed the old one.
    """
    desk.run("count", code=3)
    environment["DVC_STAGE"] = "count"
    desk.run("count", "restored, nothing is charged")
    assert desk.opened == ["count", "central"]


def test_an_older_artifact_gives_way_to_a_lost_release(desk, released, killed_at):
    desk.params(count={"noise": "1%"}, privacy={"lifetime_epsilon": 99})
    planned(desk)
    killed_at("count", "stages.runner.copy_directory")
    desk.run("count", "restored, nothing")
    record = json.loads(Path("artifacts/count/privacy.json").read_text())["records"]
    assert desk.opened == ["count", "central", "count"] and len(record) == 1


def test_a_stage_that_is_killed_again_and_again_opens_one_charge(desk, plan):
    """A short form of benchmarks/kills.py: real processes, ended by SIGKILL at three moments."""
    journal = Path("state/odometer/digits.jsonl")
    runs = Path("state/runs")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "stages.cli", "count"]
    for reached in (
        journal.exists,
        lambda: any(runs.glob("*/.released.*")),
        lambda: any(runs.glob("*/released")),
    ):
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        while process.poll() is None and not reached():
            time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if Path("artifacts/count").exists():
            break  # the stage ended before it was killed
    else:
        desk.run("count")
    assert desk.opened == ["count"]
    artifact = read_artifact(Path("artifacts/count"), "count")
    assert [record["stage"] for record in artifact.records.values()] == ["count"]
    assert not list(runs.rglob("*.tmp")) and not list(Path("artifacts").glob(".*.tmp"))


# ---- an older copy of the state directory


CACHE = Path(".dvc/cache/files/md5")


def in_cache(content: bytes, end: str = "") -> str:
    """Put a file into DVC's cache. Returns its md5, as `dvc.lock` has it."""
    name = md5_of(content) + end
    (CACHE / name[:2]).mkdir(parents=True, exist_ok=True)
    (CACHE / name[:2] / name[2:]).write_bytes(content)
    return name


def removed_by_dvc() -> None:
    """Move the artifact of count to DVC's cache, as DVC does before it runs the stage again."""
    md5 = in_cache(Path("artifacts/count/privacy.json").read_bytes())
    folder = in_cache(json.dumps([{"md5": md5, "relpath": "privacy.json"}]).encode(), ".dir")
    lock = {
        "schema": "2.0",
        "stages": {
            "count": {"cmd": "stage count", "outs": [{"path": "artifacts/count", "md5": folder}]}
        },
    }
    Path("dvc.lock").write_text(yaml.safe_dump(lock))
    shutil.rmtree("artifacts/count")


def kept_release() -> None:
    """Restore the kept release of count, so that only the journal is an older copy."""
    (newer,) = Path("newer/runs").iterdir()
    shutil.copytree(newer, Path("state/runs", newer.name), dirs_exist_ok=True)
    shutil.rmtree("artifacts/count")


EVIDENCE = {
    "the artifact to be replaced": lambda: None,
    "the artifact of a later stage": lambda: Path("artifacts/count").rename("artifacts/auxiliary"),
    "a kept release": kept_release,
    "the cache of DVC": removed_by_dvc,
}


@pytest.mark.parametrize("evidence", EVIDENCE)
def test_a_rolled_back_state_spends_nothing_again(desk, plan, evidence):
    """There is no ledger yet, but other files name the charge that the journal lacks."""
    shutil.copytree("state", "older")
    desk.run("count")
    Path("state").rename("newer")
    Path("older").rename("state")
    EVIDENCE[evidence]()
    artifacts = {path: path.read_bytes() for path in Path("artifacts").rglob("*") if path.is_file()}
    for command in ("count", "plan --dry-run", "plan"):
        desk.run(command, "digits.jsonl lacks", "stage ledger adopt", code=3)
    desk.run("doctor", "lacks", "adopt`")
    assert desk.opened == [] and all(
        path.read_bytes() == content for path, content in artifacts.items()
    )
    desk.run("ledger adopt", "1 charge adopted")
    assert (
        len(Odometer(Path("state"), "digits").opened()) == 1
        and not Odometer(Path("state"), "digits").complete()
    )


def test_a_state_copied_during_a_charge_draws_no_more(desk, plan, monkeypatch):
    """In the copy, the charge is open, but its release has left the state directory."""

    def copying(charge, *words, **more):
        if not Path("older").exists():
            shutil.copytree("state", "older")
        return release(charge, *words, **more)

    release = Charge.release
    monkeypatch.setattr(Charge, "release", copying)
    desk.run("count")
    shutil.rmtree("state")
    Path("older").rename("state")
    for command in ("count", "plan --dry-run", "plan"):
        desk.run(command, "digits.jsonl lacks", "stage ledger adopt", code=3)
    desk.run("ledger adopt", "0 charges adopted, 1 counted in total")
    before = Path("artifacts/count/counts.json").read_bytes()
    desk.run("count", "already released", code=3)
    desk.run("plan --dry-run", "already released")
    assert len(desk.opened) == 1 and Path("artifacts/count/counts.json").read_bytes() == before


def test_an_artifact_elsewhere_is_evidence_before_it_is_replaced(desk, plan):
    shutil.copytree("state", "older")
    desk.run("count --out elsewhere")
    shutil.rmtree("state")
    Path("older").rename("state")
    desk.run("count --out elsewhere", "digits.jsonl lacks", code=3)
    assert desk.opened == []


def test_a_damaged_artifact_is_adopted_with_its_charge(desk, plan):
    """Only privacy.json records what was spent. The damaged file is counts.json."""
    shutil.copytree("state", "older")
    desk.run("count")
    shutil.rmtree("state")
    Path("older").rename("state")
    Path("artifacts/count/counts.json").write_text("{}")
    desk.run("ledger adopt", "1 charge adopted")


def test_a_lost_journal_is_adopted_without_a_data_card(desk, plan):
    """`stage prepare sensitive`, which writes the card, requires the journal."""
    desk.run("count")
    Path("state/keys/digits.journal").unlink()
    shutil.rmtree("data/sensitive")
    desk.run("prepare sensitive", "stage ledger adopt", code=3)
    desk.run("ledger adopt", "1 charge adopted")
    desk.run("prepare sensitive")
