"""`stage pretrain` on tiny artifacts."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from sfumato.data.images import ImageSet, save_images
from sfumato.diffusion.unet import load_model
from sfumato.errors import ConfigError, DataError
from sfumato.settings.stages import STAGES
from sfumato.storage.artifacts import read_artifact, write_empty, writing
from stages.runner import run_stage

RECORD = {"id": "1", "stage": "histogram"}


def images(count: int, classes: str) -> ImageSet:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 1), dtype=np.uint8)
    return ImageSet(pixels, np.arange(count) % len(classes), tuple(classes))


def public(path, shape=(1, 8, 8)):
    with writing(path, "public") as directory:
        save_images(directory, images(40, "abcd"))
        card = {
            "enabled": True,
            "source": "glyphs",
            "shape": list(shape),
            "classes": list("abcd"),
            "images": 40,
        }
        (directory / "card.json").write_text(json.dumps(card))


def select(path, labels="public"):
    with writing(path, "select", records=[RECORD]) as directory:
        np.save(directory / "indices.npy", np.array([1, 3, 5, 7]))
        np.save(directory / "labels.npy", np.array([0, 1, 0, 1]))
        (directory / "selection.json").write_text(
            json.dumps({"labels": labels, "classes": ["b", "d"], "images": 4})
        )


def central(path):
    with writing(path, "central") as directory:
        np.save(directory / "mean.npy", np.full((2, 3, 1, 8, 8), 0.5, dtype=np.float32))


def auxiliary(path):
    with writing(path, "auxiliary") as directory:
        save_images(directory, images(12, "xyz"))


@pytest.fixture
def stage(here):
    """Return a function that runs the stage with given phases, on inputs in `here`."""
    Path("data").mkdir()
    Path("plan").mkdir()
    Path("artifacts").symlink_to(here)
    Path("data/public").symlink_to(here / "public")

    def run(*phases: dict, **options):
        content = {
            "stage": "pretrain",
            "revision": STAGES["pretrain"].revision,
            "enabled": True,
            "dataset_id": "tiny",
            "shape": [1, 8, 8],
            "classes": ["x", "y", "z"],
            "size_hint": 100,
            "seed": 0,
            "settings": {"phases": [{"steps": 2, "batch": 4, **phase} for phase in phases]},
            "model": {"width": 8, "multipliers": [1], "attention": [0]},
        }
        (here / "plan/pretrain.yaml").write_text(yaml.safe_dump(content))
        run_stage(STAGES["pretrain"], out=here / "out", **options)
        return here / "out"

    return run


@pytest.mark.parametrize("labels", ["public", "sensitive"])
def test_public_images_leave_a_plain_model_and_a_cost(stage, tmp_path, labels):
    public(tmp_path / "public")
    select(tmp_path / "select", labels)
    out = stage({"sources": {"public": 1.0}, "amp": {"radius": 0.1}})
    model = load_model(out)
    assert model.classes == 3 and model.label.weight.shape == (4, 32)
    assert "extra_classes" not in json.loads((out / "config.json").read_text())
    assert read_artifact(out, "pretrain").records == {"1": RECORD}


def test_all_sources_mix(stage, tmp_path):
    public(tmp_path / "public")
    select(tmp_path / "select")
    central(tmp_path / "central")
    auxiliary(tmp_path / "auxiliary")
    out = stage(
        {"sources": {"central": 1.0}, "augment": 1},
        {"sources": {"auxiliary": 1.0, "public": 1.0, "central": 1.0}},
    )
    assert sorted(path.name for path in out.glob("*.png")) == ["central.png"]


def test_only_what_the_phases_need_is_read(stage, tmp_path, capsys):
    central(tmp_path / "central")
    out = stage({"sources": {"central": 1.0}})
    assert load_model(out).classes == 3
    stage({"sources": {"public": 1.0}}, dry_run=True)
    shown = capsys.readouterr().out
    assert (
        "select" in shown
        and "public" in shown
        and "central" not in shown
        and "auxiliary" not in shown
    )


def test_an_empty_selection_is_a_clear_error(stage, tmp_path):
    public(tmp_path / "public")
    write_empty(tmp_path / "select", "select")
    with pytest.raises(
        ConfigError,
        match="pretrain requires select, .*select is an empty artifact.*add select to `run`",
    ):
        stage({"sources": {"public": 1.0}})
    assert not (tmp_path / "out").exists()


def test_a_public_set_of_another_shape_is_refused(stage, tmp_path):
    public(tmp_path / "public", shape=(3, 8, 8))
    select(tmp_path / "select")
    with pytest.raises(DataError, match="shape"):
        stage({"sources": {"public": 1.0}})
