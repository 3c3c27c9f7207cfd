"""A stage of another package, found by its entry point, is planned, run and charged like any other
stage.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import forked_stages
import numpy as np
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = '''
"""A query for the mean brightness of all images."""

from sfumato.settings.noise import Noise, QuerySettings
from sfumato.settings.stage import QUERY, Stage


class Brightness(QuerySettings):
    noise: Noise = "20%"
    brightest: float = 1.0  # Brightness at which a pixel counts in full


def brightness(run, settings):
    from sfumato.privacy.rows import Rows
    from sfumato.storage.files import write_json

    def brightness_of(images, labels):
        brightness = (images / settings.brightest).clamp(max=1).mean(dim=(1, 2, 3))
        return Rows(brightness[:, None].double())

    bound = "1: a brightness is at most 1"
    charge = run.open_charge("the summed brightness of all images", bound, 1.0)
    total = charge.sum(brightness_of, 1.0, size=100)
    with run.releasing(charge) as directory:
        write_json(directory / "brightness.json", {"mean": total.item() / run.counts.total})


def problems(setup):
    if setup.params.brightness.brightest <= 0:
        yield "brightness.brightest must be above 0: raise it"


STAGE = Stage(
    "brightness",
    QUERY,
    "Release the noisy mean brightness of all images.",
    "brightness_query:Brightness",
    brightness,
    inputs=("count",),
    problems=problems,
)
'''
PARAMS = {
    "recipe": "dp-kernel",
    "profile": None,
    "run": ["count", "frequency", "brightness", "auxiliary", "synthesize"],
    "data": {"dataset_id": "halves", "source": "npz", "path": "halves.npz"},
    "privacy": {"epsilon": 10.0, "size_hint": 200},
    "count": {"noise": "5%"},
    "frequency": {"size": 20},
    "auxiliary": {"steps": 2, "images": 10},
    "synthesize": {"count": 10},
}


def write_package(folder: Path, text: str) -> Path:
    """Write a package with one stage into a new folder. Returns the folder."""
    about = folder / "brightness_query-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "brightness_query.py").write_text(text)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: brightness-query\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[sfumato.stages]\nbrightness = brightness_query\n")
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Yield the path of the program `stage`, run by fork, in an installation that has the package
    too.
    """
    base = tmp_path_factory.mktemp("installed")
    package = write_package(base / "packages", PACKAGE)
    path = f"{ROOT}{os.pathsep}{package}"
    address = base / "socket"
    server = forked_stages.start(address, os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    yield forked_stages.client(base / "bin", address) / "stage"
    server.kill()
    server.wait()


@pytest.fixture
def run(tmp_path, installed):
    """Return a function that runs a command of `stage` in a project, with the package installed."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "params.yaml").write_text(yaml.safe_dump(PARAMS))
    (project / "pipelines").symlink_to(ROOT / "pipelines")
    images = np.full((200, 8, 8, 1), 128, np.uint8)
    images[:, 0, 0, 0] = np.arange(200)
    labels = np.arange(200) % 2
    np.savez(project / "halves.npz", images=images, labels=labels, classes=np.array(["a", "b"]))
    environment = os.environ | {"SFUMATO_STATE": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}

    def run(*words, code=0):
        done = subprocess.run(
            [installed, *words],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    run.project = project
    return run


def test_a_stage_of_another_package_is_planned_run_and_charged(run):
    assert "brightness" in run("--help")
    for command in ("prepare sensitive", "plan", "count", "frequency", "brightness"):
        run(*command.split())
    released = json.loads((run.project / "artifacts/brightness/brightness.json").read_text())
    assert released["mean"] == pytest.approx(128 / 255, abs=0.1)
    ledger = run("ledger", "history")
    assert "brightness" in ledger
    assert "already released" in run("brightness", code=3)


def test_its_settings_are_checked_before_anything_is_spent(run):
    run("prepare", "sensitive")
    for settings, message in {
        "brightest: -1": "brightness.brightest",
        "darkest: 1": "darkest",
    }.items():
        content = PARAMS | {"brightness": yaml.safe_load(settings)}
        (run.project / "params.yaml").write_text(yaml.safe_dump(content))
        assert message in run("plan", code=2)


MISTAKES = {
    "a failing import": ("raise ImportError('needs foo')", "needs foo"),
    "no stage": ("", "has no attribute 'STAGE'"),
    "the name of a query": (PACKAGE.replace('"brightness",', '"count",'), "already the name"),
    "the name of a section": (PACKAGE.replace('"brightness",', '"data",'), "another section"),
    "a setting without default": (PACKAGE.replace(' = "20%"', ""), "noise Field required"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_another_package_is_one_sentence(tmp_path, mistake):
    text, reason = MISTAKES[mistake]
    path = f"{ROOT}{os.pathsep}{write_package(tmp_path / 'packages', text)}"
    done = subprocess.run(
        [sys.executable, "-m", "stages.cli", "recipe", "show", "full"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = " ".join(done.stderr.split())
    assert done.returncode == 2 and said.startswith("error: "), said
    assert reason in said and "brightness_query" in said and "uninstall it" in said
