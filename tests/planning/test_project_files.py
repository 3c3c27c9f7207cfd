"""The files that `stage init` writes into a project, and the renewal of an older `dvc.yaml`."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import sfumato.planning.project_files
from sfumato.errors import ConfigError
from sfumato.planning.project_files import (
    WorkflowPlace,
    begin_repository,
    check_dvc,
    dvc_text,
    project_files,
    renew,
    workflow_place,
    write_project,
)
from sfumato.settings.stages import STAGES


def test_an_older_pipeline_is_renewed_with_the_owners_stages(tmp_path):
    """Version 0.2 had a stage `denoiser`. Its command no longer exists."""
    file = tmp_path / "dvc.yaml"
    content = yaml.safe_load(dvc_text())
    file.write_text(dvc_text())
    assert not renew(file) and not renew(tmp_path / "none.yaml")
    older = {"denoiser": {"cmd": "stage denoiser"}, "mine": {"cmd": "python mine.py"}}
    file.write_text(
        "# Written by `stage init`. Older.\n"
        + yaml.safe_dump({**content, "stages": content["stages"] | older})
    )
    assert renew(file) and not renew(file)
    renewed = yaml.safe_load(file.read_text())["stages"]
    assert renewed == content["stages"] | {"mine": older["mine"]} and set(STAGES) <= set(renewed)
    file.write_text("stages:\n  denoiser:\n    cmd: stage denoiser\n")
    assert not renew(file), "stage init did not write it"


@pytest.mark.parametrize("stage", ["student", "saliency"])
def test_a_pipeline_is_renewed_if_it_lacks_a_stage(tmp_path, stage):
    """If the stage were not added, `ledger` would depend on the release of a query that no stage
    runs. Such a query belongs to a new version, or to a package that was installed after the
    project was made.
    """
    file, content = tmp_path / "dvc.yaml", yaml.safe_load(dvc_text())
    content["stages"]["mine"] = {"cmd": "python mine.py", "deps": ["artifacts/synthesize"]}
    older = {name: entry for name, entry in content["stages"].items() if name != stage}
    header = "# Written by `stage init`. Older.\n"
    file.write_text(header + yaml.safe_dump({**content, "stages": older}))
    assert renew(file) and not renew(file)
    assert yaml.safe_load(file.read_text()) == content


def test_own_recipes_are_inputs_of_what_reads_them(tmp_path):
    """If a recipe were not an input, images prepared with an earlier form of the recipe would
    remain after a change.
    """
    file = tmp_path / "dvc.yaml"
    file.write_text(dvc_text())
    folder = tmp_path / "pipelines"
    (folder / "profiles").mkdir(parents=True)
    (folder / "mine.yaml").write_text("run: [count]")
    (folder / "profiles/clinic.yaml").write_text("data: {size: 32}")

    def changed() -> dict[str, set[str]]:
        """Return, for each stage, the inputs that it has only because of own recipes."""
        usual = yaml.safe_load(dvc_text())["stages"]
        stages = yaml.safe_load(file.read_text())["stages"]
        new = {
            name: {*one.get("deps", ())} - {*usual[name].get("deps", ())}
            for name, one in stages.items()
        }
        return {name: deps for name, deps in new.items() if deps}

    assert renew(file) and not renew(file)
    profile = {"pipelines/profiles/clinic.yaml"}
    assert changed() == {
        "prepare-sensitive": profile,
        "prepare-public": {"pipelines"},
        "evaluate": profile,
    }
    (folder / "profiles/clinic.yaml").write_text("seed: 1")
    assert renew(file) and changed() == {"prepare-public": {"pipelines"}}
    shutil.rmtree(folder)
    assert renew(file) and file.read_text() == dvc_text()


def test_new_inputs_leave_the_owners_edits_unchanged(tmp_path):
    file, content = tmp_path / "dvc.yaml", yaml.safe_load(dvc_text())
    edits = {"cmd": "stage prepare sensitive --workers 8", "frozen": True}
    content["stages"]["prepare-sensitive"] |= edits
    params = content["stages"]["evaluate"].pop("params")
    assert params == content["stages"]["prepare-sensitive"]["params"]
    content["plots"] = []
    file.write_text("# Written by `stage init`. Older.\n" + yaml.safe_dump(content))
    assert renew(file) and not renew(file)
    content["stages"]["evaluate"]["params"] = params
    assert yaml.safe_load(file.read_text()) == content


def test_a_pipeline_of_another_encoding_is_named(tmp_path):
    file = tmp_path / "dvc.yaml"
    file.write_bytes(b"# Written by `stage init`. Universit\xe9.\n")
    with pytest.raises(ConfigError, match=r"dvc\.yaml cannot be read .*: restore it from git"):
        renew(file)


CONTENT = {
    "recipe": "dp-merf",
    "data": {"dataset_id": "clinic"},
    "privacy": {"epsilon": 5, "size_hint": 900},
}


@pytest.mark.parametrize("folder", ["study", "sites/north wing"])
def test_a_project_in_a_larger_repository_has_a_root_workflow(folder, here):
    root = here / "repository"
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    out = root / folder
    said = []
    write_project(out, project_files(CONTENT, {}, 3, workflow_place(out)), said.append)
    (file,) = root.rglob(".github/workflows/*.yml")
    assert file.parent == root / ".github/workflows"
    workflow = yaml.safe_load(file.read_text())
    assert workflow["defaults"] == {"run": {"working-directory": folder}}
    assert (root / workflow["defaults"]["run"]["working-directory"]).samefile(out)
    assert any(file.name in line and "Commit this file too" in line for line in said)
    (line,) = [
        line for line in (out / "README.md").read_text().splitlines() if line.startswith("git add")
    ]
    named = [word for word in line.split()[2:] if (out / word).exists()]
    subprocess.run(["git", "add", *named], cwd=out, check=True)
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=root, check=True, capture_output=True, text=True
    )
    assert file.relative_to(root).as_posix() in tracked.stdout


def test_ignored_files_of_any_encoding_keep_their_lines(here, uninstall):
    uninstall("dvc")
    for name in (".gitignore", ".gitattributes"):
        (here / name).write_bytes(b"universit\xe9\n/artifacts/\n")
    said = []
    write_project(here, project_files(CONTENT, {}, 3, WorkflowPlace()), said.append)
    assert (here / ".gitattributes").read_bytes() == b"universit\xe9\n/artifacts/\n* -text\n"
    lines = (here / ".gitignore").read_bytes().splitlines()
    assert lines[:2] == [b"universit\xe9", b"/artifacts/"] and lines.count(b"/artifacts/") == 1
    assert b"/metrics.json" in lines and (here / "params.yaml").exists()
    assert any("DVC is not installed" in line for line in said)


@pytest.mark.parametrize("name", ["josé", "%(core)s", "100% mine"])
def test_a_home_of_any_name_gets_a_repository(name, here, environment):
    """In its settings, DVC stores only ASCII, and replaces `%(name)s`."""
    from dvc.config import Config

    environment["SFUMATO_STATE"] = str(here / name)
    said = []
    begin_repository(here, said.append)
    core = Config(str(here / ".dvc"))["core"]
    assert not core["analytics"]
    if said:
        words = shlex.split(said[0].split("`")[3])
        assert words == ["export", f"DVC_SITE_CACHE_DIR={here / name / 'dvc'}"]
    else:
        assert core["site_cache_dir"] == str(here / name / "dvc")
        # DVC would create its index with mode 0777
        assert (here / name / "dvc").stat().st_mode & 0o777 == 0o700


def test_dvc_can_be_installed_later(here, uninstall, environment):
    """The command that adds DVC's folder must succeed wherever the project is."""
    uninstall("dvc")
    said = []
    for name in ("own", "own/inside", "without git"):
        (here / name).mkdir()
        if name == "without git":
            environment["PATH"] = str(here)
        begin_repository(here / name, said.append)
        words = shlex.split(said[-1].split("`")[3])
        done = subprocess.run([sys.executable, "-m", *words, "-q"], cwd=here / name, check=False)
        assert done.returncode == 0 and (here / name / ".dvc").is_dir(), name


@pytest.mark.usefixtures("here")
def test_a_project_whose_name_begins_with_a_dash_is_tracked():
    write_project(Path("-dash"), project_files(CONTENT, {}, 3, WorkflowPlace()), print)
    assert Path("-dash/.git").is_dir() and Path("-dash/.dvc").is_dir()


def test_a_kept_workflow_of_another_limit_is_named(here):
    said = []
    for epsilon in (5, 5, 8):
        said.clear()
        content = CONTENT | {"privacy": CONTENT["privacy"] | {"epsilon": epsilon}}
        write_project(here, project_files(content, {}, 3, WorkflowPlace()), said.append)
        assert any("Change its command to" in line for line in said) == (epsilon == 8)
    (line,) = [line for line in said if "Change its command to" in line]
    assert "checks another limit" in line and "`stage ledger check --epsilon 8 --delta " in line
    workflow = yaml.safe_load((here / ".github/workflows/ledger.yml").read_text())
    assert "--epsilon 5 " in workflow["jobs"]["ledger"]["steps"][-1]["run"]


def test_a_failed_init_can_be_repeated(here, monkeypatch):
    files = project_files(CONTENT, {}, 3, WorkflowPlace())
    with monkeypatch.context() as patch:
        patch.setattr(sfumato.planning.project_files, "fits_dvc_config", lambda _: 1 / 0)
        with pytest.raises(ConfigError, match="`dvc init` failed in .*: division by") as seen:
            write_project(here, files, print)
    assert seen.value.public, "the reason contains nothing about images"
    assert not (here / ".dvc").exists() and not (here / "params.yaml").exists()
    write_project(here, files, print)
    assert (here / ".dvc/config.local").exists() and (here / "params.yaml").exists()


@pytest.mark.parametrize(
    "error",
    [
        KeyError("getpwuid(): uid not found: 54321"),  # before Python 3.13
        OSError("No username set in the environment"),
    ],
)
def test_an_account_without_a_name_is_told_to_set_one(error, here, monkeypatch):
    def no_account(path: Path) -> None:
        raise error

    monkeypatch.setattr(sfumato.planning.project_files, "fits_dvc_config", no_account)
    with pytest.raises(ConfigError, match="this account has no name: set LOGNAME"):
        begin_repository(here, print)


def test_a_project_must_be_usable_by_dvc(here, uninstall):
    (here / "project").mkdir()
    os.chdir(here / "project")
    with pytest.raises(ConfigError, match="has no folder .dvc"):
        check_dvc(Path())
    begin_repository(here, print)
    check_dvc(Path())  # DVC's folder is in a parent folder
    shutil.rmtree(here / ".git")
    with pytest.raises(ConfigError, match="run `git init`.* run `dvc config core.no_scm true`"):
        check_dvc(Path())
    with (here / ".dvc/config").open("a") as file:
        file.write("    no_scm = true\n")
    check_dvc(Path())
    uninstall("dvc")
    with pytest.raises(ConfigError, match="DVC is not installed.* use `stage run`"):
        check_dvc(Path())


def test_a_project_of_its_own_has_the_workflow_that_it_had(here):
    assert workflow_place(here / "new") == WorkflowPlace(".github/workflows/ledger.yml", "")
    text = project_files(CONTENT, {}, 3, WorkflowPlace())[".github/workflows/ledger.yml"]
    # PyYAML reads the key `on` as true
    assert [*yaml.safe_load(text)] == ["name", True, "permissions", "jobs"]
    subprocess.run(["git", "init", "-q", str(here / "own")], check=True)
    assert workflow_place(here / "own") == WorkflowPlace()


def test_a_repository_may_have_a_name_that_is_not_utf_8(here):
    """Old file servers contain names in Latin-1."""
    root = here / os.fsdecode(b"r\xf6ntgen")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    assert workflow_place(root / "new").directory == "new"
