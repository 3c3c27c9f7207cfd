"""Every shipped recipe that needs no downloaded model runs with its own features, networks and
sources, for few steps.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from parts import of_baselines
from PIL import Image

import sfumato
from sfumato.settings.fields import both_sides, by
from sfumato.settings.stages import QUERIES, STAGES

PIPELINES = sorted((Path(__file__).resolve().parents[2] / "pipelines").glob("*.yaml"))
RECIPES = {path.stem: yaml.safe_load(path.read_text()) for path in PIPELINES}
OF_IMAGES = [name for name, recipe in RECIPES.items() if "directory" not in recipe.get("model", {})]
SMALL = {
    "profile": None,
    "data": {"dataset_id": "small", "source": "npz", "path": "source.npz"},
    "privacy": {"epsilon": 1, "size_hint": 300},  # a small ε is accounted faster
    "model": {"width": 16, "multipliers": [1, 1], "unshuffle": 1},
    "public": {"per_class": 4},
    "central": {"noise": "2%"},
    "frequency": {"size": 100},
    "embedding": {"size": 100, "learned": {"steps": 2}},
    "classifier": {"steps": 2, "width": 8},
    # 24 images of each of 10 classes: noisy counts may request all 24 images of one class
    "select": {"images": 240},
    "auxiliary": {"steps": 2, "batch": 40, "images": 40},
    "refine": {"steps": 2, "batch": 40, "images": 40},
    "pretrain": {"steps": 4, "batch": 8},
    "finetune": {"steps": 2, "batch": 30, "draws": 1},
    "synthesize": {"count": 24, "steps": 2},
    "student": {"steps": 2, "width": 4},
    **of_baselines("baseline_settings", "SMALL"),
}


# One recipe of each family, run at 8×12. Together they have every query and every kind of
# generator.
OBLONG = ["dp-mepf", "feta-pro", "sapf-pixel", "teacher-diffusion", "teacher-gaussian"]
OBLONG += of_baselines("baseline_settings", "OBLONG")


@pytest.mark.parametrize("name", OF_IMAGES)
def test_a_recipe_runs_as_shipped_to_a_valid_ledger(desk, digits, name):
    size = (8, 12) if name in OBLONG else 8
    images = digits.images[:317]
    labels = digits.labels[:317]
    if size == 8:
        np.savez("source.npz", images=images, labels=labels, classes=np.array(digits.classes))
    else:  # a folder of pictures in other proportions
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            path = Path(f"pictures/{label}/{number}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[..., 0]).resize((15, 9)).save(path)
    run = [stage for stage in RECIPES[name]["run"] if stage != "evaluate"]
    desk.base = SMALL
    data = (
        {}
        if size == 8
        else {"source": "imagefolder", "path": "pictures", "size": [*size], "channels": 1}
    )
    images = {"select", *of_baselines("baseline_settings", "IMAGES")}
    streams = not {*RECIPES[name]["synthesize"].get("sources", ["finetune"])} <= images
    synthesize = {"stream": streams, "mark": "files"}
    run += ["student"] * streams
    few = {"ratio": 0.2} if "histogram" in run else {}  # 10 of 62
    desk.params(recipe=name, run=run, data=data, select=few, synthesize=synthesize)
    desk.run_all("prepare sensitive", "prepare public", "plan", *STAGES, "ledger write")
    released = sfumato.load_release("artifacts/synthesize").images
    assert (
        released.shape == (SMALL["synthesize"]["count"], *both_sides(size), 1)
        and released.std() > 1
    )
    assert f"images of {by(size)} pixels" in Path("artifacts/synthesize/README.md").read_text()
    if streams:
        ((images, labels, _),) = itertools.islice(
            sfumato.stream("artifacts/synthesize", batch=8), 1
        )
        assert images.shape == (8, 1, *both_sides(size)) and labels.shape == (8, 10)
        student = sfumato.load_student("artifacts/student")
        assert student.ledger == sfumato.load_release("artifacts/synthesize").ledger
        assert student.probabilities(released[:3]).shape == (3, 10)
    ledger = json.loads(Path("ledger.json").read_text())
    assert (
        {record["stage"] for record in ledger["records"]}
        == set(run) & set(QUERIES)
        == set(desk.opened)
    )
    assert 0.9 < ledger["epsilon"]["rdp"] <= 1
