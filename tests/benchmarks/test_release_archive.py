"""The archive of a release for publication: verified, licensed, and the same bytes each time."""

import json
import subprocess
import sys
import zipfile

import pytest
import yaml
from release_archive import write_archive
from small_release import write_project


@pytest.fixture
def project(tmp_path, digits):
    path = write_project(tmp_path / "project", digits)
    settings = {"release": {"licence": "cc-by-4.0", "owner": "A clinic"}}
    (path / "params.yaml").write_text(yaml.safe_dump(settings))
    return path


def test_an_archive_verifies_without_sfumato(project, tmp_path):
    write_archive(project, tmp_path / "a.zip", "Digits, scikit-learn", "bsd-3-clause")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        archive.extractall(tmp_path / "opened")
    check = tmp_path / "opened" / "check"
    done = subprocess.run([sys.executable, "-I", "verify.py"], cwd=check, capture_output=True)
    assert done.returncode == 0
    card = (tmp_path / "opened" / "release" / "README.md").read_text()
    assert card.startswith("---\n") and "differential-privacy" in card
    deposit = json.loads((tmp_path / "opened" / "zenodo.json").read_text())
    assert deposit["license"] == "cc-by-4.0" and "bsd-3-clause" in deposit["description"]
    assert deposit["creators"] == [{"name": "A clinic"}]


def test_two_archives_of_a_release_are_equal(project, tmp_path):
    for name in ("a.zip", "b.zip"):
        write_archive(project, tmp_path / name, "Digits", "bsd-3-clause")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_a_release_without_a_licence_is_not_packed(project, tmp_path):
    (project / "params.yaml").write_text("release: {owner: A clinic}")
    with pytest.raises(SystemExit, match=r"release\.licence"):
        write_archive(project, tmp_path / "a.zip", "Digits", "bsd-3-clause")
    assert not (tmp_path / "a.zip").exists()
