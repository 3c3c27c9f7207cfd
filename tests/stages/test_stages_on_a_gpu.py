"""The stages of recipes on a simulated GPU, from 40 digits to a release, run as commands."""

import json
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
import yaml
from parts import of_baselines
from pretended_gpu import pretended_gpu

from sfumato.settings.stages import QUERIES, STAGES

PIPELINES = Path(__file__).resolve().parents[2] / "pipelines"
EVALUATED = ["teacher-generator", "full"]
# No recipe runs this stage. Here, it is added to `teacher-generator`, with a stream
ADDED = ("student",)
# Recipes that contain the remaining stages
OTHERS = ["teacher-public", "dp-mepf", "teacher-gaussian", "sapf-pixel"]
OTHERS += of_baselines("baseline_settings", "RECIPES")
# A test leaves these stages on the CPU, and checks that this is noticed. They are examples of all
# kinds of stages with a network of their own
PLANTED = ("histogram", "select", "pretrain", "saliency", "finetune", "synthesize")
# stages that need no card: they count labels, sum pixels, or choose images by number
IDLE = {"count", "central"}
IDLE_IN = {
    "teacher-public": {"synthesize"},
    "sapf-pixel": {"select"},
    "teacher-gaussian": {"auxiliary"},
    **of_baselines("baseline_settings", "IDLE_IN"),
}
# Recipe -> places where products of real tensors may run on the CPU: features that are rebuilt
# with one image, a layer that whitens patches once, and Gaussians
ON_CPU = {
    "teacher-generator": {
        "features/public_network.py WhitenedCNN.whiten",
        "storage/weights.py Room.__torch_function__",
        "features/projection.py ProjectedFeatures.projected",
        "features/public_network.py PooledBlock.forward",
    },
    "teacher-gaussian": {
        "generators/gaussian.py shrink_eigenvalues",
        "generators/gaussian.py GaussianGenerator.forward",
    },
    **of_baselines("baseline_settings", "ON_CPU"),
}
SMALL = {
    "profile": None,
    "data": {"dataset_id": "small", "source": "npz", "path": "source.npz"},
    "privacy": {"epsilon": 1, "size_hint": 40, "unit": "image"},  # a small ε is accounted faster
    "model": {"width": 8, "multipliers": [1], "attention": [0], "unshuffle": 1},
    "public": {"per_class": 4},
    "central": {"noise": "2%"},
    "frequency": {"size": 100},
    "teacher": {"steps": 2},
    "classifier": {"steps": 2, "width": 8},
    **of_baselines("baseline_settings", "SMALLER"),
    "auxiliary": {"steps": 2, "batch": 40, "images": 40},
    "embedding": {"size": 100, "learned": {"steps": 2}},
    "refine": {"steps": 2, "batch": 40, "images": 40},
    "pretrain": {"steps": 2, "batch": 16},
    "finetune": {"steps": 2, "batch": 20, "draws": 1},
    "synthesize": {"count": 24, "steps": 2},
    "student": {"steps": 2},
    "evaluate": {"classifiers": ["lr", "cnn"], "seeds": [0], "steps": 2},
}


def recipe_of(name: str) -> dict:
    return yaml.safe_load((PIPELINES / f"{name}.yaml").read_text())


@pytest.fixture
def untrained(monkeypatch):
    """Skip the check of trained weights, because weights on a simulated card have no numbers."""
    monkeypatch.setattr("sfumato.dpsgd.trainable.check_trained", lambda *weights: None)


def write_source(digits) -> None:
    np.savez(
        "source.npz",
        images=digits.images[:40],
        labels=digits.labels[:40],
        classes=np.array(digits.classes),
    )


def run_stages(desk, card, environment, run: list[str], on_cpu: Collection[str] = ()) -> set[str]:
    """Prepare, plan and run all stages. Returns the stages of `run` that put nothing on the card.

    on_cpu: stages for which the machine has no card.
    """
    environment["SFUMATO_DEVICE"] = "cuda"
    desk.run_all("prepare sensitive", "prepare public", "plan")
    idle = set()
    for stage in STAGES:
        before = card.held
        environment["SFUMATO_DEVICE"] = "cpu" if stage in on_cpu else "cuda"
        desk.run_all(stage)
        if stage in run and card.held == before:
            idle.add(stage)
    return idle


def test_every_stage_is_in_some_recipe_here():
    assert {stage for name in EVALUATED + OTHERS for stage in recipe_of(name)["run"]} | {
        *ADDED
    } == set(STAGES)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", EVALUATED + OTHERS)
def test_every_stage_of_a_recipe_runs_on_a_gpu(
    desk, digits, environment, short_judging, untrained, name
):
    write_source(digits)
    stages = (
        {*recipe_of(name)["run"], *ADDED} if name == "teacher-generator" else recipe_of(name)["run"]
    )
    run = [
        stage for stage in STAGES if stage in stages and (stage != "evaluate" or name in EVALUATED)
    ]
    desk.base = SMALL
    # 24 images of each of 10 classes: noisy counts may request all 24 images of one class
    select = {"ratio": 0.2} if "histogram" in run else {"images": 240}
    desk.params(recipe=name, run=run, select=select, synthesize={"stream": "student" in run})
    with pretended_gpu() as card:
        idle = run_stages(desk, card, environment, run)
        desk.run_all("ledger write")
    assert (idle - IDLE, {*card.on_cpu} - ON_CPU.get(name, set())) == (
        IDLE_IN.get(name, set()),
        set(),
    )
    assert np.load("artifacts/synthesize/images.npy").shape == (24, 8, 8, 1)
    records = json.loads(Path("ledger.json").read_text())["records"]
    assert {record["stage"] for record in records} == set(run) & set(QUERIES)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_stage_that_stays_on_the_cpu_is_idle(desk, digits, environment, untrained):
    write_source(digits)
    run = ["count", "classifier", "teacher", *PLANTED]
    desk.base = SMALL
    desk.params(
        recipe="sapf-pixel",
        run=run,
        select={"by": "teacher", "images": 240},
        teacher={"noise": "2%"},
        finetune={"trainable": "attention"},  # an adapter's meta tensors would count as the card's
    )
    with pretended_gpu() as card:
        assert run_stages(desk, card, environment, run, on_cpu=PLANTED) - IDLE == {*PLANTED}
