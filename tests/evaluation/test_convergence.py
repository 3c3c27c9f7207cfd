"""The local convergence curve: it does not change the training, and a run that has one can never be released."""

import json
import sys
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from sfumato.data.images import save_images
from sfumato.diffusion.unet import UNet
from sfumato.errors import ConfigError, DataError
from sfumato.evaluation import convergence, downstream, extractors
from sfumato.evaluation.convergence import ROWS, Convergence
from sfumato.evaluation.extractors import Extractor
from sfumato.privacy.ledger import build_ledger, ledger_text
from sfumato.privacy.resolved import StagePlan
from sfumato.release.report import report_page
from sfumato.settings.evaluate import Evaluate
from sfumato.settings.stages import STAGES
from sfumato.settings.training import Model
from sfumato.storage.artifacts import read_artifact, writing
from stages.cli import main

PIXELS = Extractor(name="pixels-64", digest="pixels", dimension=64, embed=lambda images: images.flatten(1))


@pytest.fixture
def model() -> UNet:
    torch.manual_seed(0)
    return UNet(channels=1, resolution=8, classes=10, width=8, multipliers=(1,), attention=(), blocks=1)


def test_measuring_leaves_the_model_its_mode_and_the_generator_alone(model, digits, tmp_path):
    curve = Convergence(PIXELS, digits.images[:100].reshape(100, -1) / 255, images=20)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    average = {name: value.detach() + 0.1 for name, value in model.named_parameters()}
    random = torch.get_rng_state()
    first, second = (curve.measure(model.train(), average, step) for step in (1, 2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()) and model.training
    assert torch.equal(random, torch.get_rng_state()) and first["frechet"] == second["frechet"] > 0
    assert (
        curve.measure(model, {name: value.detach() for name, value in model.named_parameters()}, 3)["frechet"]
        != first["frechet"]
    )
    assert curve.text().splitlines()[0] == "step,frechet,images,space" and curve.text().splitlines()[1].endswith(
        ",20,pixels-64"
    )


def test_a_resumed_run_keeps_the_rows_up_to_its_durable_step(model, digits, tmp_path):
    real, average = (
        digits.images[:100].reshape(100, -1) / 255,
        {name: value.detach() for name, value in model.named_parameters()},
    )
    curve = Convergence(PIXELS, real, images=10)
    curve.resume(tmp_path, 0)
    for step in (2, 4, 6):
        curve.measure(model, average, step)
    again = Convergence(PIXELS, real, images=10)
    again.resume(tmp_path, 4)
    assert [row["step"] for row in again.rows] == [2, 4] and len(json.loads((tmp_path / ROWS).read_text())) == 3


SMALL = {
    "recipe": "dpdm",
    "profile": "digits",
    "privacy": {"epsilon": 10.0, "size_hint": 300},
    "data": {"dataset_id": "small", "source": "npz", "path": "source.npz"},
    "model": {"width": 8, "multipliers": [1], "attention": []},
    "finetune": {"steps": 3, "batch": 30, "draws": 1},
    "synthesize": {"count": 40, "steps": 2},
}


@pytest.fixture
def desk(tmp_path, monkeypatch, digits):
    """A folder with prepared digits, and `stage` as a function: (exit code, output). Small networks, few steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SFUMATO_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("SFUMATO_CHECKPOINT_EVERY", "1")
    monkeypatch.setattr(downstream, "MIN_STEPS", 5)
    monkeypatch.setattr(extractors, "DRAWN_PER_CLASS", {"glyphs": 4, "procedural": 4})
    monkeypatch.setattr(convergence, "SOLVER_STEPS", 2)
    Path("pipelines").symlink_to(Path(__file__).resolve().parents[2] / "pipelines")
    np.savez(
        "source.npz", images=digits.images[:300, ..., 0], labels=digits.labels[:300], classes=np.array(digits.classes)
    )

    def call(*words, **changes):
        if changes:
            Path("params.yaml").write_text(yaml.safe_dump(SMALL | changes))
        out = StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["stage", *words])
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", out)
            with pytest.raises(SystemExit) as end:
                main()
                raise SystemExit(0)
        return int(end.value.code or 0), " ".join(out.getvalue().split())

    return call


def run(desk, **finetune) -> None:
    """Everything up to `stage finetune`, which is left to the test."""
    for words in (("prepare", "sensitive"), ("prepare", "public"), ("plan",), *((name,) for name in BEFORE)):
        code, text = desk(*words, finetune=SMALL["finetune"] | finetune)
        assert code == 0, text


BEFORE = list(STAGES)[: list(STAGES).index("finetune")]


def test_a_run_with_a_curve_is_local_and_nothing_of_it_can_be_released(desk):
    run(desk, convergence=[1, 3])
    code, text = desk("finetune")
    assert code == 0 and "this run is local" in text, text
    assert json.loads(Path("artifacts/finetune/privacy.json").read_text())["local"] is True
    lines = Path("evaluation/convergence.csv").read_text().splitlines()
    assert not list(Path("artifacts/finetune").glob("conv*"))  # DVC would put its hash into git
    assert [line.split(",")[0] for line in lines] == ["step", "1", "3"]
    code, text = desk("synthesize")
    assert (
        code == 4
        and "artifacts/finetune is local" in text
        and "Traceback" not in text
        and not Path("artifacts/synthesize").exists()
    )
    with writing(Path("artifacts/synthesize"), "synthesize"):
        pass  # even beside a release from elsewhere
    code, text = desk("ledger", "write")
    assert code == 4 and "artifacts/finetune is local" in text and not Path("ledger.json").exists()
    journal = [json.loads(line) for line in Path("state/odometer/small.jsonl").read_text().splitlines()]
    assert [entry["purpose"] for entry in journal if entry["kind"] == "local"] == ["convergence"]


def test_without_a_curve_fine_tuning_writes_what_the_noised_sums_give_and_no_more(desk):
    run(desk)
    assert desk("finetune")[0] == 0
    assert json.loads(Path("artifacts/finetune/privacy.json").read_text())["local"] is False
    assert {path.name for path in Path("artifacts/finetune").iterdir()} == {
        "config.json",
        "weights.safetensors",
        "trainable.json",
        "log.csv",
        "privacy.json",
    }
    assert (
        Path("artifacts/finetune/log.csv").read_text().splitlines()[0]
        == "step,learning_rate,noised_gradient_norm,epsilon"
    )
    journal = [json.loads(line) for line in Path("state/odometer/small.jsonl").read_text().splitlines()]
    assert not [entry for entry in journal if entry["kind"] == "local"] and not list(Path("state").rglob(ROWS))
    assert desk("synthesize")[0] == 0


def test_the_public_report_refuses_what_is_local(tmp_path, digits):
    with writing(tmp_path / "synthesize", "synthesize", local=True) as directory:
        save_images(directory, digits)
    (tmp_path / "ledger.json").write_text(
        ledger_text(
            build_ledger({"recipe": "r", "accountant": "rdp", "delta": 1e-4, "size_hint": 400, "target": 1.0}, {}, [])
        )
    )
    with pytest.raises(DataError, match="is local"):
        report_page(tmp_path / "synthesize", tmp_path / "ledger.json")
    assert read_artifact(tmp_path / "synthesize", allow_local=True).local


def test_a_step_that_never_comes_and_a_missing_feature_space_are_refused(desk):
    code, text = desk("prepare", "sensitive", finetune=SMALL["finetune"])
    code, text = desk("plan", finetune=SMALL["finetune"] | {"convergence": [4]})
    assert code == 2 and "finetune.convergence names step 4" in text and "Traceback" not in text
    run(desk, convergence=[1])
    plan = Path("artifacts/plan/evaluate.yaml")
    content = yaml.safe_load(plan.read_text())
    content["settings"]["fidelity"] = []
    plan.write_text(yaml.safe_dump(content))
    code, text = desk("finetune")
    (entry,) = Path("state/odometer/small.jsonl").read_text().splitlines()
    assert code == 2 and "needs a feature space" in text and json.loads(entry)["kind"] == "genesis"  # nothing is spent


def test_a_public_model_has_no_curve(tmp_path):
    plan = StagePlan(stage="evaluate", enabled=True, settings=Evaluate(), digest="", shape=(1, 8, 8))
    with pytest.raises(ConfigError, match="model.directory"):
        convergence.open_curve(plan, Model(directory="/models/sd"), tmp_path, None, print)
