"""A light command must not import an array library, an accountant or a network."""

import json
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sfumato.planning.project_files import dvc_text

ROOT = Path(__file__).resolve().parents[2]
GALLERY = ROOT / "docs" / "gallery" / "digits" / "ledger.json"
CHECK = ("ledger", "check", "--ledger-only", "--epsilon", "10", "--ledger", str(GALLERY))
RUN = """
import json, sys
from stages.cli import main
sys.argv = ["stage", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print(json.dumps([*sys.modules]), file=sys.stderr)
"""
NETWORKS = {"torch", "opacus", "sklearn", "pandas", "matplotlib", "dvc"}
HEAVY = NETWORKS | {"numpy", "scipy", "dp_accounting"}
CARD = {
    "dataset_id": "digits",
    "source": "digits",
    "shape": [1, 8, 8],
    "classes": ["0", "1"],
    "split": "keyed",
}


@pytest.fixture
def project(tmp_path, environment) -> Path:
    """Create a folder with a recipe that reads no public images, and with the card of prepared
    images.
    """
    environment["SFUMATO_STATE"] = str(tmp_path / "state")
    params = {
        "recipe": "dp-merf",
        "profile": "digits",
        "data": {"source": "digits"},
        "privacy": {"size_hint": 1500},
    }
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    card = tmp_path / "data" / "sensitive" / "card.json"
    card.parent.mkdir(parents=True)
    card.write_text(json.dumps(CARD | {"version": "1"}))
    return tmp_path


def imported(folder: Path, *words: str) -> set[str]:
    run = [sys.executable, "-c", RUN, *words]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {*json.loads(done.stderr.splitlines()[-1])}


def test_help_imports_no_library_of_data_and_no_parameters(project):
    found = imported(project, "--help")
    assert not found & (HEAVY | {"rich", "sfumato.settings.params"})


def test_an_empty_public_set_is_written_without_an_array_library(project):
    assert not imported(project, "prepare", "public") & HEAVY
    assert json.loads((project / "data" / "public" / "card.json").read_text())["enabled"] is False


@pytest.fixture(scope="module")
def imported_by_a_check(tmp_path_factory) -> set[str]:
    """Return the modules that a check of a ledger without its project imports."""
    return imported(tmp_path_factory.mktemp("check"), *CHECK)


@pytest.mark.parametrize("recipe", ["feta-pro", "teacher-generator"])
def test_a_plan_imports_no_network(project, recipe):
    file = project / "params.yaml"
    file.write_text(file.read_text().replace("dp-merf", recipe))
    (project / "dvc.yaml").write_text(dvc_text())
    assert not imported(project, "plan") & (NETWORKS | {"sfumato.planning.estimate"})


def test_a_ledger_is_checked_without_networks(project, imported_by_a_check):
    assert not imported_by_a_check & NETWORKS
    assert "opacus" in imported(project, *CHECK, "--opinions", "all")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import sfumato
from sfumato.errors import ConfigError
try:
    sfumato.load_teacher
except ConfigError as error:
    print(error)
try:
    sfumato.Release.to_torch(None)
except ConfigError as error:
    print(error)
"""


def test_a_missing_package_is_named_with_its_install():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True
    )
    ends = "requires torch, which is not installed: run `pip install torch`"
    assert done.stdout.splitlines() == [f"sfumato.load_teacher {ends}", f"to_torch {ends}"]


def listed() -> set[str]:
    lines = (ROOT / "check.txt").read_text().splitlines()
    return {line for line in lines if line and line != "." and not line.startswith(("#", "-"))}


def test_the_reviewers_packages_lack_none_that_they_require():
    required = {
        Requirement(text)
        for name in listed()
        for text in requires(name) or ()
        if (marker := Requirement(text).marker) is None or marker.evaluate({"extra": ""})
    }
    assert {canonicalize_name(one.name) for one in required} <= listed()


def test_a_ledger_check_imports_only_what_reviewers_install(imported_by_a_check):
    """The packages of all modules that the check imports are in check.txt."""
    packages = packages_distributions()
    modules = {name.split(".")[0] for name in imported_by_a_check if "__mypyc" not in name}
    found = {canonicalize_name(one) for name in modules for one in packages.get(name, ())}
    optional = {"charset-normalizer"}  # NumPy imports it if it is there
    assert found - listed() - optional <= {"sfumato", "setuptools"}
