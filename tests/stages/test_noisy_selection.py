"""If a class histogram is only noise, the selection is random, and the pipeline still ends with a
release.
"""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from sfumato.settings.stages import STAGES

SMALL = {
    "profile": "digits",
    "privacy": {"epsilon": 1.0},
    "model": {"width": 16, "multipliers": [1, 1]},
    "public": {"per_class": 4},
    "classifier": {"steps": 15, "width": 8},
    "histogram": {"noise": 1e6},
    "select": {"ratio": 0.16},
    "pretrain": {"steps": 10, "batch": 16},
    "finetune": {"steps": 2, "batch": 60, "draws": 1},
    "synthesize": {"count": 60, "steps": 2},
}


@pytest.mark.parametrize(("recipe", "label"), [("privimage", "sensitive"), ("rpgen", "public")])
def test_pure_noise_selects_at_random_and_the_pipeline_completes(recipe, label, desk):
    desk.params(**SMALL, recipe=recipe)
    stages = [name for name in STAGES if name != "evaluate"]
    desk.run_all("prepare sensitive", "prepare public", "plan", *stages, "ledger write")
    desk.check("--epsilon 1 --artifacts")
    selection = json.loads(Path("artifacts/select/selection.json").read_text())
    assert selection["labels"] == label and len(selection["kept"]) == 10
    with Path("artifacts/select/selection.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert any(abs(float(row["noisy_count"])) > 1e5 for row in rows), (
        "1437 images cannot have given so many votes"
    )
    right = sum(row["public_class"] == row["relabelled_as"] for row in rows)
    # A digit gets its own class with a probability of 1/62. More than 3 of the 10 digits do so in
    # one of 70 000 runs.
    assert label == "public" or right <= 3
    labels = np.load("artifacts/synthesize/labels.npy")
    assert np.load("artifacts/synthesize/images.npy").shape == (60, 8, 8, 1) and set(labels) <= set(
        range(10)
    )
