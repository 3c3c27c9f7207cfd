"""A project from Python. A whole run of one is in `test_init.py`, where its folder has a release already."""

import json
import re

import pytest
import yaml
from test_init import write_shapes

import sfumato
from sfumato.errors import ConfigError, DataError
from sfumato.privacy.odometer import Odometer


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("SFUMATO_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "dvc"))
    images = write_shapes(tmp_path / "photos", each=20)
    return sfumato.Project.create(tmp_path / "project", images=images, epsilon=5, minutes=1, size_hint=50)


def test_a_plan_is_a_table_of_cost_and_minutes_and_spends_nothing(project, tmp_path):
    own = yaml.safe_load((project.folder / "params.yaml").read_text())
    assert own["privacy"] == {"epsilon": 5.0, "size_hint": 50}
    assert repr(project) == f"<Project {tmp_path / 'project'}: nothing released yet>"
    table = project.plan()
    assert {"count", "synthesize"} <= {*table.index} and (table["minutes"] > 0).all()
    assert table["share"].sum() == pytest.approx(1) and table.loc["synthesize"].isna()["epsilon"]
    assert 4.9 < table.attrs["epsilon"] <= table.attrs["target"] == 5
    assert not Odometer(tmp_path / "state", "photos").opened()
    assert json.loads((project.folder / "artifacts/plan/budget.json").read_text())["epsilon"] == table.attrs["epsilon"]


def test_options_are_those_of_stage_init_and_an_unknown_one_is_named(project, tmp_path):
    images = {"images": tmp_path / "photos", "epsilon": 5}
    with pytest.raises(ConfigError, match="--nonsense"):
        sfumato.Project.create(tmp_path / "other", **images, nonsense=1)
    with pytest.raises(ConfigError) as refused:
        sfumato.Project.create(tmp_path / "other", images=tmp_path / "photos", epsilon=-1)
    assert "Invalid value for '--epsilon'" in str(refused.value) and not {*"╭│╰"} & {*str(refused.value)}
    with pytest.raises(ConfigError, match="holds params.yaml and dvc.yaml already"):
        sfumato.Project.create(project.folder, **images, one_image_each=True, range=(-1000, 400))
    assert not (tmp_path / "other").exists()


def test_a_failure_is_the_error_of_the_stage(project, tmp_path):
    params = project.folder / "params.yaml"
    params.write_text(re.sub(r"epsilon: [\d.]+", "epsilon: 0", params.read_text()))
    with pytest.raises(ConfigError, match=r"privacy\.epsilon"):
        project.plan()
    with pytest.raises(DataError, match="not a release"):
        _ = project.release
    with pytest.raises(DataError, match="call run"):
        project.report()
    with pytest.raises(ConfigError, match="not a project"):
        sfumato.Project(tmp_path)
