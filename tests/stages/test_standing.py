"""While DVC runs the stages, a terminal shows the progress of the pipeline. For stages that are
switched off, it shows nothing.
"""

import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from test_recipes import SMALL

from sfumato.data.images import ImageSet
from sfumato.planning.project_files import dvc_content
from sfumato.release.release import ENLARGED, save_preview
from sfumato.settings.stages import STAGES
from sfumato.storage.artifacts import read_artifact
from stages.state import PREVIEW

RUN = ["count", "frequency", "auxiliary", "synthesize"]
ERASED = re.compile(r"\x1b\[(\d)A\x1b\[J")


@pytest.fixture
def desk(desk, digits, environment, expect_seconds):
    """Plan a project on digits, with an estimate of one minute per stage.

    The environment is as if DVC were running `count`. `dvc.lock` is new, as if DVC had just written
    it after another stage.
    """
    np.savez(
        "source.npz",
        images=digits.images[:317],
        labels=digits.labels[:317],
        classes=np.array(digits.classes),
    )
    desk.base = SMALL
    desk.params(recipe="dp-merf", run=RUN)
    desk.run_all("prepare sensitive", "plan")
    Path("dvc.yaml").write_text(yaml.safe_dump(dvc_content()))
    expect_seconds(lambda params: dict.fromkeys(STAGES, 60.0))
    environment["DVC_STAGE"] = "count"
    Path("dvc.lock").touch()
    return desk


def test_each_stage_states_its_place_minutes_and_epsilon(desk):
    desk.terminal = True
    Path("params.yaml").write_text("run: [")  # someone is editing this file
    said = {
        name: desk.run(name)
        for name in ("count", "central", "frequency", "auxiliary", "refine", "synthesize")
    }
    assert ERASED.sub("", said["central"]) == ERASED.sub("", said["refine"]) == ""
    place = (
        r"stage (\d of \d), .*: (about \d min, then about \d min for later stages); "
        r"ε = ([\d.]+) of 1 spent so far"
    )
    shown = {name: re.search(place, " ".join(said[name].split())) for name in RUN}
    places = {name: (found[1], found[2]) for name, found in shown.items()}
    assert places == {
        name: (f"{i + 1} of 4", f"about 1 min, then about {3 - i} min for later stages")
        for i, name in enumerate(RUN)
    }
    spent = [float(found[3]) for found in shown.values()]
    assert spent[0] == 0 < spent[1] < spent[2] == spent[3] == pytest.approx(1, abs=0.005)
    assert "look at artifacts/preview.png" in " ".join(said["synthesize"].split())
    assert "look at" not in " ".join(said["auxiliary"].split())
    assert "auxiliary: first pictures in artifacts/preview.png" in said["auxiliary"]
    with Image.open("artifacts/preview.png") as preview:
        assert preview.height > 10 * ENLARGED and preview.width > ENLARGED, (
            "a row with a name for each of 10 classes"
        )
    written = {
        out if isinstance(out, str) else next(iter(out))
        for entry in dvc_content()["stages"].values()
        for out in entry.get("outs", [])
    }
    assert not written & {str(path) for path in (PREVIEW, *PREVIEW.parents)}, (
        "DVC would miss it in older projects"
    )


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_the_preview_shows_each_class_in_a_row_of_its_own(classes, here):
    """Class m has the grey level 20 · m. Each row shows only pictures of its class."""
    names = tuple(f"class {label}" for label in range(classes))
    labels = np.arange(100) % classes
    images = np.broadcast_to((20 * labels).astype(np.uint8)[:, None, None, None], (100, 8, 8, 1))
    save_preview(Path("preview.png"), ImageSet(images, labels, names), "auxiliary")
    pixels = np.asarray(Image.open("preview.png"))
    rows = classes
    columns = max(1, 8 // classes)
    side = ENLARGED + 2
    assert pixels.shape[0] == rows * side + 2
    shown = [
        [int(pixels[2 + row * side, -1 - place * side - 2]) for place in range(columns)]
        for row in range(rows)
    ]
    assert shown == [[20 * row] * columns for row in range(rows)]


def test_only_lines_that_dvc_just_printed_are_removed(desk):
    desk.terminal = True
    assert ERASED.match(desk.run("central"))[1] == "4"
    os.utime("dvc.lock", (0, time.time() - 60))
    assert ERASED.match(desk.run("central"))[1] == "2", "what stands above is not of DVC"


def test_a_stage_runs_without_its_line_if_a_file_is_missing(desk):
    desk.terminal = True
    Path("artifacts/plan/budget.json").unlink()
    assert ERASED.sub("", desk.run("count")) == ""
    assert read_artifact(Path("artifacts/count"), "count").enabled


def test_a_log_and_a_stage_by_hand_get_nothing_of_it(desk, environment):
    assert "\x1b" not in desk.run("count") + desk.run("central")
    desk.terminal = True
    del environment["DVC_STAGE"]
    assert "\x1b" not in desk.run("central")
