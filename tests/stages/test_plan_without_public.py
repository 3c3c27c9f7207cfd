"""The dry run states what the next run spends, even if public images are missing or out of date."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_lock import write_lock
from yaml import safe_dump, safe_load

NOTHING = "which spends nothing"
TEACHER = {
    "recipe": "teacher-public",
    "run": ["count", "teacher", "select", "synthesize"],
    "teacher": {"feature": "scattering"},
    "select": {"images": 20},
    "synthesize": {"count": 10},
    "public": {"per_class": 2},
}
HISTOGRAM = {
    "recipe": "privimage",
    "run": ["count", "classifier", "histogram", "select", "synthesize"],
    "classifier": {"steps": 3},
    "histogram": {"noise": "rest"},
    "select": {"images": 20},
    "synthesize": {"count": 10, "sources": {"select": 1}},
    "public": {"per_class": 2},
}


@pytest.fixture
def pictures() -> Path:
    """Write a folder of public pictures with a test part, which is not used."""
    random = np.random.default_rng(0)
    for number in range(60):
        folder = Path("pictures") / ("test" if number > 40 else "train") / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return Path("pictures")


def released(desk, base) -> None:
    """Run every stage of `base` except the last, which releases."""
    desk.base = base
    desk.params()
    desk.run_all("prepare sensitive", "prepare public", "plan", *base["run"][:-1])
    write_lock()
    desk.run("plan --dry-run", NOTHING)


def test_missing_public_images_cost_nothing(desk):
    """DVC removes public images before it runs `prepare public`. This command may then stop at
    invalid parameters.
    """
    released(desk, TEACHER)
    shutil.rmtree("data/public")
    desk.params(privacy={"epsilon": 0})
    desk.run("prepare public", "privacy.epsilon=0", code=2)
    desk.params()
    desk.run("plan --dry-run", "teacher: already released as", NOTHING)
    desk.run_all("prepare public", "plan")
    shutil.rmtree("artifacts/teacher")
    desk.run("teacher")
    assert desk.opened == ["count", "teacher"]


def test_a_missing_folder_of_public_pictures_costs_nothing(desk, pictures):
    files = {"source": "imagefolder", "path": "pictures", "declared_public": True}
    released(desk, TEACHER | {"public": files})
    shutil.rmtree("data/public")
    desk.run("plan --dry-run", "teacher: already released as", NOTHING)
    shutil.move(pictures, "elsewhere")
    text = desk.run("plan --dry-run", "teacher: would again spend")
    assert "whether its release can be restored" in " ".join(text.split())
    shutil.move("elsewhere", pictures)
    for file in pictures.rglob("*0.png"):
        file.unlink()
    desk.run("plan --dry-run", "teacher: would again spend", "public images, which have changed")
    desk.run_all("prepare public", "plan", "teacher")
    assert desk.opened == ["count", "teacher", "teacher"]


@pytest.mark.parametrize("base", [TEACHER, HISTOGRAM], ids=["teacher", "histogram"])
def test_other_public_images_are_announced_as_a_cost(desk, base):
    """The dry run once promised that nothing would be spent, but the run spent."""
    released(desk, base)
    query = next(name for name in base["run"][1:] if name in ("teacher", "histogram"))
    desk.params(public={"per_class": 3})
    again = f"{query}: would again spend"
    desk.run("plan --dry-run", "not prepared yet", again, "public images, which have changed")
    desk.run("prepare public")
    desk.run("plan --dry-run", again)
    desk.run("plan")
    write_lock_of_public()
    desk.run("plan --dry-run", again)
    desk.run_all(*base["run"][1:3])
    assert desk.opened == ["count", query, query]


def write_lock_of_public() -> None:
    """Write the lock of a run that was interrupted after `stage plan`."""
    lock = Path("dvc.lock")
    before = safe_load(lock.read_text())
    write_lock()
    now = safe_load(lock.read_text())
    for name in ("prepare-public", "plan"):
        before["stages"][name] = now["stages"][name]
    lock.write_text(safe_dump(before))


def test_settings_of_an_interrupted_run_are_announced_as_a_cost(desk):
    released(desk, HISTOGRAM)
    desk.params(classifier={"steps": 4})
    desk.run("plan --dry-run", "histogram: would again spend", "depends on classifier")
    desk.run("plan")
    write_lock_of_public()
    desk.run("plan --dry-run", "histogram: would again spend", "depends on classifier")
    desk.run_all("classifier", "histogram")
    assert desk.opened == ["count", "histogram", "histogram"]
