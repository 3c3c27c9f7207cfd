"""Every shipped recipe that needs no downloaded model, with its own features, networks and sources, at few steps."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from sfumato.settings.stages import QUERIES, STAGES

PIPELINES = sorted((Path(__file__).resolve().parents[2] / "pipelines").glob("*.yaml"))
RECIPES = {path.stem: yaml.safe_load(path.read_text()) for path in PIPELINES}
OF_IMAGES = [name for name, recipe in RECIPES.items() if "directory" not in recipe.get("model", {})]
SMALL = {
    "profile": None,
    "data": {"dataset_id": "small", "source": "npz", "path": "source.npz"},
    "privacy": {"epsilon": 10, "size_hint": 300},
    "model": {"width": 16, "multipliers": [1, 1], "unshuffle": 1},
    "public": {"per_class": 4},
    "frequency": {"size": 100},
    "classifier": {"steps": 4, "width": 8},
    "evolve": {"rounds": 2, "population": 40, "images": 40},
    "adversarial": {"steps": 2, "batch": 60, "images": 40},
    "select": {"images": 200},
    "auxiliary": {"steps": 4, "batch": 40, "images": 40},
    "refine": {"steps": 2, "batch": 40, "images": 40},
    "pretrain": {"steps": 4, "batch": 16},
    "finetune": {"steps": 4, "batch": 60, "draws": 1},
    "synthesize": {"count": 40, "steps": 3},
}


@pytest.mark.parametrize("name", OF_IMAGES)
def test_a_recipe_runs_as_it_is_shipped_from_images_to_a_ledger_that_holds(desk, digits, name):
    np.savez("source.npz", images=digits.images[:317], labels=digits.labels[:317], classes=np.array(digits.classes))
    run = [stage for stage in RECIPES[name]["run"] if stage != "evaluate"]
    desk.base = SMALL
    desk.params(recipe=name, run=run, select={"ratio": 0.2} if "histogram" in run else {})  # 10 classes of 62
    desk.run_all("prepare sensitive", "prepare public", "plan", *STAGES, "ledger write")
    released = np.load("artifacts/synthesize/images.npy")
    assert released.shape == (40, 8, 8, 1) and released.std() > 1
    ledger = json.loads(Path("ledger.json").read_text())
    assert {record["stage"] for record in ledger["records"]} == set(run) & set(QUERIES) == set(desk.opened)
    assert 9 < ledger["epsilon"]["rdp"] <= 10
