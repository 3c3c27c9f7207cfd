"""The order in which `stage run` runs stages without DVC; `test_pipeline.py` runs them."""

import pytest
import yaml
from small_lock import commit_lock
from small_repository import ROOT

from sfumato.errors import ConfigError
from stages import without_dvc
from stages.dvc_lock import COPY, keep_copy
from stages.run import run


def test_targets_run_with_all_that_they_read():
    steps = without_dvc.read_steps(ROOT / "dvc.yaml")
    names = [step.name for step in without_dvc.selected_steps(steps, ["central"])]
    assert names == [
        name
        for name in names
        if name in ("prepare-sensitive", "prepare-public", "plan", "count", "central")
    ]
    assert names[-2:] == ["count", "central"] and len(names) == 5
    with pytest.raises(ConfigError, match="did you mean 'central'"):
        without_dvc.selected_steps(steps, ["centrall"])


@pytest.mark.parametrize(
    "more", [{"foreach": ["a"], "do": {"cmd": "true"}}, {"cmd": "echo ${item}"}]
)
def test_what_only_dvc_understands_is_refused(tmp_path, more):
    file = tmp_path / "dvc.yaml"
    file.write_text(yaml.safe_dump({"stages": {"mine": more}}))
    with pytest.raises(ConfigError, match="'mine' uses .* only DVC understands"):
        without_dvc.read_steps(file)


def test_a_run_without_dvc_updates_an_outdated_pipeline(here, monkeypatch):
    (here / "params.yaml").write_text("{profile: null, data: {}}")
    (here / "dvc.yaml").write_text("# Written by `stage init`. Older.\nstages: {}\n")
    ran = []
    monkeypatch.setattr(without_dvc, "run_if_changed", lambda _, step, *__: ran.append(step.name))
    run(["prepare-public"], without=True)
    assert ran == ["prepare-sensitive", "prepare-public"]


def test_a_run_without_dvc_continues_from_an_older_commit(here):
    (here / "params.yaml").write_text("{profile: null, data: {}}")
    stages = {name: {"cmd": f"touch {name}", "outs": [name]} for name in ("one", "two", "three")}
    (here / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    run(["one"], without=True)
    commit_lock()
    older = (here / "dvc.lock").read_bytes()
    run(without=True)
    COPY.parent.mkdir(parents=True)
    keep_copy()
    whole = (here / "dvc.lock").read_bytes()
    (here / "dvc.lock").write_bytes(older)
    run(without=True)
    assert (here / "dvc.lock").read_bytes() == whole


def test_stage_run_orders_the_stages_without_dvc(here, uninstall, monkeypatch):
    (here / "dvc.yaml").touch()  # a merged project has no params.yaml
    ordered = []
    monkeypatch.setattr(without_dvc, "run_in_order", lambda *given: ordered.append(given))
    uninstall("dvc")
    run(["count"])
    assert ordered == [(here, ["count"])]


def test_a_refused_run_is_explained_on_a_terminal(here, desk):
    """Errors of DVC and its stages are on the terminal already. Other errors must be printed."""
    (here / "dvc.yaml").touch()
    desk.terminal = True
    desk.run("run", "error: the project has no folder .dvc", code=2)


def test_a_project_without_the_folder_of_dvc_is_refused(here):
    (here / "dvc.yaml").touch()
    with pytest.raises(ConfigError, match="run `dvc init`.* use `stage run --no-dvc`"):
        run()
