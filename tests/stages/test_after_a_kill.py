"""After a kill in the default project (lifetime = ε), the plan counts an open charge once, and the
query resumes.
"""

import errno
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sfumato.settings.stages import STAGES
from sfumato.storage.files import replace_file

IMAGES = 200
ONE_SHOT = {
    "in the query": ("sfumato.queries.count.query_count", "resumes"),
    "while it is written": ("sfumato.queries.count.save_counts", "resumes"),
    "before it is journalled": ("sfumato.privacy.charge.Charge.close", "restored, nothing"),
    "before it is taken over": ("stages.runner.copy_directory", "restored, nothing"),
}
DP_SGD = {  # moment -> function at which the run dies, number of the call
    "before the first step": ("sfumato.dpsgd.run.step", 1),
    "after a checkpoint": ("sfumato.dpsgd.run.step", 3),
    "after the last checkpoint": ("sfumato.diffusion.ema.ema_model", 1),
    "while it is written": ("sfumato.dpsgd.trainable.save_trained", 1),
}
DP_SGD_RELEASED = {
    "before it is journalled": ("sfumato.privacy.charge.Charge.close", 1),
    "before it is taken over": ("stages.runner.copy_directory", 1),
    "before its checkpoint is dropped": ("sfumato.privacy.checkpoint.drop_checkpoints", 1),
}


@pytest.fixture
def desk(desk, digits):
    """Create a project as `stage init` does, with small settings and persons of two images each."""
    for i in range(IMAGES):
        folder = Path("pictures") / str(digits.labels[i])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(digits.images[i, :, :, 0])).save(
            folder / f"p{i // 2:03d}_{i}.png"
        )
    desk.base = {
        "recipe": "dp-feta",
        "profile": None,
        "run": ["count", "central", "pretrain", "finetune", "synthesize"],
        "data": {
            "dataset_id": "set",
            "source": "imagefolder",
            "path": "pictures",
            "size": 8,
            "channels": 1,
        },
        "privacy": {"epsilon": 5.0, "size_hint": 100, "unit": "image"},
        "model": {"width": 8, "multipliers": [1, 1]},
        "pretrain": {"steps": 2, "batch": 8},
        "finetune": {"steps": 3, "batch": 20, "draws": 1},
    }
    desk.params()
    return desk


@pytest.mark.parametrize("moment", ONE_SHOT)
def test_the_plan_counts_an_open_charge_once(desk, killed_at, moment):
    name, becomes = ONE_SHOT[moment]
    desk.run_all("prepare sensitive", "prepare public", "plan")
    killed_at("count", name)
    closed = becomes == "restored, nothing" and not moment.endswith("journalled")
    word = "already released as" if becomes == "restored, nothing" else "at no further cost"
    text = desk.run("plan --dry-run", word, "next: `stage run` will spend: central")
    assert "would spend" not in next(
        line for line in text.splitlines() if line.startswith("count:")
    )
    desk.run("doctor", word)
    desk.run("plan")
    assert len([entry for entry in desk.journal if entry["kind"] == "close"]) == closed
    assert ("restored, nothing" in desk.run("count")) == (becomes == "restored, nothing")
    assert desk.opened == ["count"]
    desk.run(
        "plan --dry-run", "count: already released as", "next: `stage run` will spend: central"
    )


def test_a_full_disk_loses_no_charge(desk, killed_at):
    desk.run_all("prepare sensitive", "prepare public", "plan")
    for name in (
        "sfumato.queries.count.save_counts",
        "sfumato.privacy.charge.Charge.close",
        "stages.runner.copy_directory",
    ):
        killed_at("count", name, end=OSError(errno.ENOSPC, "No space left on device"))
        desk.run("plan")
        shutil.rmtree("artifacts/count", ignore_errors=True)
    desk.run("count", "restored, nothing")
    assert desk.opened == ["count"]


def test_an_unprepared_version_counts_until_it_is_undone(desk):
    desk.base = {key: desk.base[key] for key in ("profile", "data", "privacy")} | {
        "recipe": "dp-merf"
    }
    desk.params(frequency={"size": 50})
    desk.run_all("prepare sensitive", "prepare public", "plan", "count", "frequency", "plan")
    params = Path("params.yaml").read_bytes()
    card = Path("data/sensitive/card.json").read_bytes()
    text = params.decode().replace("dataset_id: set", "dataset_id: set\n  version: '2027'")
    Path("params.yaml").write_text(
        text.replace("epsilon: 5.0", "epsilon: 5.0\n  lifetime_epsilon: 11.0")
    )
    said = desk.run("plan --dry-run", "not prepared as version 2027", "count: would again spend")
    assert "frequency" in said.split("`stage run` will spend:")[1]
    desk.run_all("prepare sensitive", "plan")
    Path("params.yaml").write_bytes(params)
    desk.run("plan --dry-run", "count: already released as", "which spends nothing")
    desk.run_all("prepare sensitive", "plan")
    assert Path("data/sensitive/card.json").read_bytes() == card
    assert desk.opened == ["count", "frequency"]


def test_a_damaged_release_is_restored_without_a_charge(desk):
    desk.run_all("prepare sensitive", "prepare public", "plan", "count")
    file = Path("artifacts/count/counts.json")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    said = desk.run("central", "no longer has the bytes", "or, without DVC, `stage count`", code=4)
    assert "spend_again" not in said
    desk.run("count", "restored, nothing is charged")
    assert file.read_bytes() == whole and desk.opened == ["count"]
    assert "spend_again" not in desk.run("count", "already released", "A copy is kept", code=3)


UNITS = {
    "image": {},
    "group": {"data": {"groups": {"pattern": r"^(p\d+)_"}}, "privacy": {"unit": "group"}},
}


@pytest.fixture(params=UNITS)
def trained(desk, request, environment):
    """Run all stages before DP-SGD, which saves a checkpoint after each step."""
    environment["SFUMATO_CHECKPOINT_EVERY"] = "1"
    desk.params(**UNITS[request.param])
    desk.run_all("prepare sensitive", "prepare public", "plan", "count", "central", "pretrain")
    return desk


def test_dp_sgd_resumes_after_kills_under_the_lifetime(trained, killed_at):
    for name, times in DP_SGD.values():
        killed_at("finetune", name, times)
        trained.run(
            "plan --dry-run", "finetune: resumes run", "next: `stage run`, which spends nothing"
        )
        trained.run("plan")
    trained.run("finetune")
    assert trained.opened == ["count", "central", "finetune"]
    assert not list(Path("state/runs").glob("*/checkpoint-*"))


@pytest.mark.parametrize("moment", DP_SGD_RELEASED)
def test_a_kill_after_dp_sgd_is_written_has_its_release_put_back(trained, killed_at, moment):
    killed_at("finetune", *DP_SGD_RELEASED[moment])
    assert list(Path("state/runs").glob("*/checkpoint-*"))
    trained.run(
        "plan --dry-run", "finetune: already released as", "next: `stage run`, which spends nothing"
    )
    trained.run("plan")
    shutil.rmtree("artifacts/finetune", ignore_errors=True)  # DVC does this before it runs a stage
    trained.run("finetune", "restored, nothing is charged")
    assert trained.opened == ["count", "central", "finetune"]
    assert not list(Path("state/runs").glob("*/checkpoint-*"))


def test_a_kill_before_dropping_a_checkpoint_leaves_none(trained, killed_at):
    killed_at("finetune", *DP_SGD_RELEASED["before its checkpoint is dropped"])
    assert list(Path("state/runs").glob("*/checkpoint-*"))
    trained.run("finetune", "already released", "A copy is kept", code=3)  # the artifact is there
    assert not list(Path("state/runs").glob("*/checkpoint-*"))


def test_the_dry_run_announces_a_refusal_for_other_weights(trained):
    trained.run_all(
        "finetune", *(name for name in STAGES if name not in (*trained.base["run"], "evaluate"))
    )
    trained.run("plan --dry-run", "finetune: already released as", "not charged again")
    with Path("artifacts/pretrain/privacy.json").open("a") as file:
        file.write("\n")  # another number of threads could change the bytes too
    for command in ("plan --dry-run", "doctor"):
        trained.run(command, "Its inputs have changed")
    trained.run("finetune", "Its inputs have changed", code=3)


def test_a_lost_checkpoint_is_charged_after_a_warning(trained, killed_at):
    killed_at("finetune", "sfumato.dpsgd.run.step", 3)
    trained.run("plan --dry-run", "finetune: resumes run")
    (checkpoint,) = Path("state/runs").glob("*/checkpoint-*")
    replace_file(checkpoint, checkpoint.read_bytes()[:-1] + b"?")
    trained.run("plan", "would be exceeded", code=3)
    trained.run("finetune", "is lost", "would be exceeded", code=3)
    assert trained.opened == ["count", "central", "finetune"]
