"""`stage` on tiny public models: a run from images to a ledger, a user's mistakes, and an
installation without the extra.
"""

import contextlib
import io
import json
import os
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import fresh_imports
import numpy as np
import pytest
import torch
import yaml
from small_lock import write_lock
from small_record import small_record
from typer.testing import CliRunner

from sfumato.errors import ConfigError, SfumatoError
from sfumato.planning.folder import resolve_project
from sfumato.privacy.events import Mechanism
from sfumato.release.synthesizer import load_synthesizer
from sfumato.settings.recipes import load_params, overlaid
from sfumato.settings.stages import STAGES
from sfumato.storage.artifacts import read_artifact, writing
from sfumato.storage.digest import digest_of_file
from sfumato.text_to_image.network import load_latent
from stages.cli import app

ROOT = Path(__file__).resolve().parents[2]
CLASSES = ("zero", "one", "two")


SMALL = {
    "profile": None,
    "data": {"dataset_id": "tiny", "source": "npz", "path": "source.npz"},
    "privacy": {"epsilon": 1.0, "size_hint": 60},
    "finetune": {"steps": 3, "batch": 12},
    "synthesize": {"count": 12, "steps": 3},
}


def stage(folder: Path, *words: str, code: int = 0) -> str:
    """Run a command of `stage` in this process. Returns its output or its error."""
    with contextlib.chdir(folder), contextlib.redirect_stderr(io.StringIO()):
        result = CliRunner().invoke(app, list(words))
    if isinstance(result.exception, SfumatoError):
        assert result.exception.exit_code == code, result.exception
        return str(result.exception)
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.fixture
def repository(here, environment) -> Path:
    """Write sixty grey images of 8×8 in three classes to a project. Returns its folder."""
    environment["SFUMATO_CHECKPOINT_EVERY"] = "1"
    environment["SFUMATO_MICROBATCH"] = "4"
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (60, 8, 8)).astype(np.uint8)
    np.savez(
        here / "source.npz", images=images, labels=np.arange(60) % 3, classes=np.array(CLASSES)
    )
    (here / "pipelines").symlink_to(ROOT / "pipelines")
    return here


def set_up(repository: Path, directory: Path, recipe: str, **more) -> None:
    model = {"directory": str(directory), "declared_public": True}
    content = overlaid(SMALL | {"recipe": recipe, "model": model}, more)
    stages = load_params(ROOT / "params.yaml", ROOT / "pipelines", recipe=recipe).run
    # `evaluate` takes the longest
    content.setdefault("run", [name for name in stages if name != "evaluate"])
    (repository / "params.yaml").write_text(yaml.safe_dump(content))


def test_a_missing_model_is_reported_before_images_are_listed(repository, monkeypatch):
    """If the images were listed first, the reason would be withheld when there is no terminal."""
    data = {"dataset_id": "own", "source": "npz", "path": "source.npz", "size": 8, "channels": 1}
    set_up(repository, Path("missing"), "dp-finetune", data=data)
    monkeypatch.setattr("sfumato.errors.watchers", [Mock(side_effect=AssertionError)])
    with pytest.raises(ConfigError, match=r"model\.directory=.* does not exist"):
        resolve_project(repository, repository / "state", Path("params.yaml"), dry_run=True)


RUN = [name for name in STAGES if name not in ("classifier", "select", "evaluate")]


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("transformer", "dp-sapf"),
        ("unet-epsilon", "dp-finetune"),
        ("unet-v", "dp-ldm"),
        ("transformer", "dp-lora"),
    ],
)
def test_the_whole_pipeline_ends_in_images_with_a_ledger(models, repository, kind, recipe):
    set_up(repository, models / kind, recipe)
    before = {
        file: digest_of_file(file) for file in sorted((models / kind).rglob("*")) if file.is_file()
    }
    stage(repository, "prepare", "sensitive")
    stage(repository, "prepare", "public")
    if recipe == "dp-sapf":
        assert "finetune: memory about" in stage(repository, "plan", "--dry-run")
    stage(repository, "plan")
    if recipe == "dp-sapf":
        assert "memory  about" in stage(repository, "finetune", "--dry-run")
    for name in RUN:
        stage(repository, name)
    artifacts = repository / "artifacts"
    images = np.load(artifacts / "synthesize/images.npy")
    labels = np.load(artifacts / "synthesize/labels.npy")
    assert (
        images.shape == (12, 8, 8, 1)
        and images.dtype == np.uint8
        and set(labels) <= {0, 1, 2}
        and images.std() > 1
    )
    stage(repository, "ledger", "write")
    with contextlib.chdir(repository):
        write_lock()
    assert "0.9" in stage(repository, "ledger", "check", "--epsilon", "1", "--artifacts")
    ledger = json.loads((repository / "ledger.json").read_text())
    queries = ["count", "finetune", *(["saliency"] if recipe == "dp-sapf" else [])]
    assert sorted(record["stage"] for record in ledger["records"]) == queries
    # The model's own files are untouched
    assert before == {file: digest_of_file(file) for file in before}
    assert not list((artifacts / "pretrain").glob("*weights*"))
    assert sum(f.stat().st_size for f in (artifacts / "pretrain").iterdir()) < 200_000
    base = load_latent(artifacts / "pretrain")
    tuned = load_synthesizer(artifacts / "finetune", artifacts / "pretrain")
    moved = {
        name
        for name, value in base.named_parameters()
        if not torch.equal(value, tuned.get_parameter(name))
    }
    trained = json.loads((artifacts / "finetune/trainable.json").read_text())["trained"]
    assert moved == {re.sub(r"\.[AB]$", ".weight", name) for name in trained}
    # The latents are private, made once and journalled once.
    (home,) = (repository / "state/data/tiny").glob("latents-*")
    assert home.stat().st_mode & 0o777 == 0o700 and all(
        file.stat().st_mode & 0o777 == 0o600 for file in home.iterdir()
    )
    journal = (repository / "state/odometer/tiny.jsonl").read_text()
    assert journal.count('"latents"') == 1
    assert not any(b"latents.npy" in file.read_bytes() for file in artifacts.rglob("*.json"))


def test_a_users_mistake_is_one_sentence_and_an_exit_code(models, repository, uninstall):
    model = models / "unet-epsilon"
    set_up(repository, model, "dp-sapf", model={"sha256": "0" * 64})
    for words in ("prepare sensitive", "prepare public", "plan"):
        stage(repository, *words.split())
    assert "model.sha256" in stage(repository, "pretrain", code=4)
    assert "does not exist" in stage_with(repository, repository / "nowhere", code=2)
    assert "multiples of 4" in stage_with(repository, model, code=2, model={"image_size": 18})
    warm = PUBLIC | {"recipe": "dpdm", "pretrain": {"phases": [{"sources": {"public": 1}}]}}
    assert "a public model, which is not trained" in stage_with(repository, model, code=2, **warm)
    prompt = {"recipe": "dpdm", "model": {"prompt": "A {class}"}}
    assert "model.directory is not set" in stage_with(repository, None, code=2, **prompt)
    spoiled = shutil.copytree(model, repository / "spoiled")
    weights = spoiled / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    assert "Pickles (.bin, .ckpt)" in stage_with(repository, spoiled, code=4)
    uninstall("diffusers")
    assert "pip install 'sfumato[diffusers]'" in stage_with(repository, model, code=2)
    journal = repository / "state/odometer/tiny.jsonl"
    assert not journal.exists() or '"open"' not in journal.read_text()


def test_a_model_made_from_sensitive_images_brings_records(models, repository):
    """The cost of a fine-tuned model was once lost if this model was used as the public one."""
    record = small_record(
        7, Mechanism(noise_multiplier=3.0), stage="finetune", dataset_id="another"
    )
    with writing(repository / "tuned", "finetune", records=[record]) as directory:
        shutil.copytree(models / "unet-epsilon", directory / "model")
    own = {"model": {"declared_public": False}}
    set_up(repository, models / "unet-epsilon", "dp-finetune", **own)
    stage(repository, "prepare", "sensitive")
    stage(repository, "prepare", "public")
    assert "model.declared_public: true" in stage(repository, "plan", code=2)
    set_up(repository, repository / "tuned" / "model", "dp-finetune", **own)
    assert "1 charge of earlier releases" in stage(repository, "plan")
    stage(repository, "pretrain")
    assert read_artifact(repository / "artifacts/pretrain").records == {record["id"]: record}


PUBLIC = {"run": ["pretrain", "select", "finetune", "synthesize"], "select": {"ratio": 1}}


def stage_with(
    repository: Path, directory: Path | None, code: int, recipe: str = "dp-sapf", **more
) -> str:
    set_up(repository, directory or Path(), recipe, **more)
    if directory is None:
        content = yaml.safe_load((repository / "params.yaml").read_text())
        del content["model"]["directory"]
        (repository / "params.yaml").write_text(yaml.safe_dump(content))
    return stage(repository, "plan", code=code)


# ---- without the extra


ABSENT = ("diffusers", "transformers", "accelerate", "huggingface_hub")


def test_the_base_install_imports_nothing_of_it(tmp_path):
    code = """
import sys
import torch
torch.set_num_threads(1)  # because threads do not survive a fork
class Absent:
    def find_spec(self, name, *rest):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import importlib, importlib.util, pkgutil, sfumato, stages
found = importlib.util.find_spec
missing = ("diffusers", "transformers")
importlib.util.find_spec = lambda name, *rest: None if name in missing else found(name, *rest)
for package in (sfumato, stages):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
from stages.doctor import doctor
doctor()
"""
    environment = os.environ | {
        "SFUMATO_STATE": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "400",
    }
    code = code.replace("ABSENT", repr(ABSENT))
    output = fresh_imports.printed(code, tmp_path, ROOT, environment, again=ABSENT)
    assert "sfumato[diffusers]" in output and "dp-sapf" in output
