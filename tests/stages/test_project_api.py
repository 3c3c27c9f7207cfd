"""A project in Python.

`test_init.py` also tests `run`, in a folder that already has a release.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from small_repository import programs
from test_init import write_shapes

import sfumato
from sfumato.errors import ConfigError, DataError
from sfumato.planning import project as project_module
from sfumato.privacy.odometer import Odometer


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFUMATO_STATE", str(folder / "state"))
        patch.setenv("DVC_SITE_CACHE_DIR", str(folder / "dvc"))
        patch.setattr(
            project_module,
            "sys",
            SimpleNamespace(executable=programs() / "module", platform="other"),
        )
        images = write_shapes(folder / "photos", each=20)
        yield sfumato.Project.create(
            folder / "project", images=images, epsilon=5, minutes=1, size_hint=50
        )


def test_a_plan_is_a_table_of_cost_and_minutes(project):
    own = yaml.safe_load((project.folder / "params.yaml").read_text())
    assert own["privacy"] == {"epsilon": 5.0, "size_hint": 50, "accountant": "exact"}
    assert repr(project) == f"<Project {project.folder}: nothing released yet>"
    table = project.plan()
    assert {"count", "synthesize"} <= {*table.index} and (table["minutes"] > 0).all()
    assert table["share"].sum() == pytest.approx(1) and table.loc["synthesize"].isna()["epsilon"]
    assert 4.9 < table.attrs["epsilon"] <= table.attrs["target"] == 5
    assert not Odometer(project.folder.parent / "state", "photos").opened()
    assert not (project.folder / "artifacts").exists()


def test_two_threads_plan_two_projects_and_each_gets_its_own(project, tmp_path):
    """When both threads used the process's current folder, 78 of 120 plans belonged to the other
    thread's project.
    """
    found: dict[float, list] = {5.0: [], 2.0: []}
    other = tmp_path / "other"
    shutil.copytree(project.folder, other)
    params = yaml.safe_load((other / "params.yaml").read_text())
    params["privacy"]["epsilon"] = 2.0
    (other / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    meet = threading.Barrier(2)

    def plan(epsilon: float, of: sfumato.Project) -> None:
        for _ in range(6):
            meet.wait(60)
            found[epsilon].append(of.plan().attrs["target"])

    threads = [
        threading.Thread(target=plan, args=pair)
        for pair in ((5.0, project), (2.0, sfumato.Project(other)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {5.0: [5.0] * 6, 2.0: [2.0] * 6}
    assert Path.cwd() == tmp_path / "elsewhere" and not any(Path().iterdir())


def test_options_equal_those_of_stage_init(project, tmp_path):
    images = {"images": project.folder.parent / "photos", "epsilon": 5}
    with pytest.raises(TypeError, match="nonsense"):
        sfumato.Project.create(tmp_path / "other", **images, nonsense=1)
    with pytest.raises(ConfigError, match="^epsilon=-1: Input should be greater"):
        sfumato.Project.create(tmp_path / "other", images=images["images"], epsilon=-1)
    with pytest.raises(ConfigError, match="already contains params.yaml and dvc.yaml"):
        sfumato.Project.create(project.folder, **images, one_image_each=True, range=(-1000, 400))
    assert not (tmp_path / "other").exists()


def test_a_failure_is_the_error_of_the_stage(project, tmp_path):
    params = project.folder / "params.yaml"
    text = params.read_text()
    for key, wrong, message in (
        (r"epsilon: [\d.]+", "epsilon: 0", r"privacy\.epsilon=0 is not valid: [^\n]*$"),
        ("profile: null\n", "", "params.yaml lacks the key 'profile': add the line"),
    ):
        params.write_text(re.sub(key, wrong, text))
        for call in (project.plan, project.run):
            with pytest.raises(ConfigError, match=message):
                call()
    params.write_text(re.sub("path: .*", "path: /none", text))
    with pytest.raises(DataError, match=r"data\.path=/none does not exist: [^\n]*$"):
        project.run()  # raised in the stage that DVC runs
    params.write_text(text)
    with pytest.raises(DataError, match="not a release"):
        _ = project.release
    with pytest.raises(DataError, match="call run"):
        project.report()
    with pytest.raises(DataError, match=r"metrics\.json does not exist"):
        _ = project.verdict
    with pytest.raises(ConfigError, match="not a project"):
        sfumato.Project(tmp_path)


def test_the_verdict_is_read_where_the_evaluation_wrote_it(project):
    said = {"level": "fair", "sentence": "fair (81 % of what there is to learn)", "learned": 0.81}
    (project.folder / "metrics.json").write_text(json.dumps({"scope": "local", "verdict": said}))
    assert project.verdict == said
    other = {"scope": "local", "verdict": said, "identity": {"release": "another.dir"}}
    (project.folder / "metrics.json").write_text(json.dumps(other))
    with pytest.raises(DataError, match="another release: run `stage evaluate`"):
        _ = project.verdict
    (project.folder / "metrics.json").unlink()


DVC = [sys.executable, "-m", "dvc"]
SLOW = """
import os, signal, sys, time
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
print(os.getsid(0), file=open("session", "w"), flush=True)
try:
    time.sleep(60)
finally:
    open("stopped", "w").close()
"""


def test_a_run_keeps_dvcs_index_in_the_state_directory(tmp_path, environment):
    """The project's DVC settings may name a folder in which other accounts can write."""
    environment["SFUMATO_STATE"] = str(tmp_path / "state")
    environment["DVC_SITE_CACHE_DIR"] = str(tmp_path / "before")
    old = tmp_path / "old"
    for words in ("init -q --no-scm", f"config --local core.site_cache_dir {old}"):
        subprocess.run([*DVC, *words.split()], cwd=tmp_path, check=True)
    (tmp_path / "dvc.yaml").write_text("stages: {nothing: {cmd: 'true'}}")
    del environment["DVC_SITE_CACHE_DIR"]
    project_module.repro(tmp_path, shown=False)
    index = tmp_path / "state/dvc"
    assert [folder.stat().st_mode & 0o777 for folder in (index, index.parent)] == [0o700, 0o700]
    assert any(index.iterdir()) and not old.exists()


@pytest.mark.parametrize(("stage", "end"), [("hears", signal.SIGKILL), ("deaf", signal.SIGINT)])
def test_dvc_and_its_stage_end_with_the_process_that_called_run(tmp_path, environment, stage, end):
    environment["DVC_NO_ANALYTICS"] = "1"
    environment["DVC_SITE_CACHE_DIR"] = str(tmp_path / "dvc")
    subprocess.run([*DVC, "init", "-q", "--no-scm"], cwd=tmp_path, check=True)
    (tmp_path / "params.yaml").write_text("{profile: null, data: {}}")
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "dvc.yaml").write_text(
        f"stages: {{slow: {{cmd: {sys.executable} slow.py {stage}}}}}"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", "import sfumato; sfumato.Project().run()"], cwd=tmp_path
    )
    said = tmp_path / "session"
    while not (said.exists() and said.read_text()):
        assert caller.poll() is None
        time.sleep(0.05)
    session = int(said.read_text())
    assert session != os.getsid(caller.pid)
    caller.send_signal(end)
    start = time.monotonic()
    with pytest.raises(ProcessLookupError):
        while time.monotonic() - start < 5:
            os.killpg(session, 0)
            time.sleep(0.05)
    assert (tmp_path / "stopped").exists() == (stage == "hears")
    caller.wait()
