"""`stage run`: what changed, in forks of one process; and the same without DVC."""

import pytest
import yaml
from small_repository import AFTER, QUERIES, ROOT, Repository, make_repository, ran

from sfumato.errors import ConfigError
from sfumato.settings.stages import STAGES
from stages import without_dvc
from stages.run import run


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Repository:
    return make_repository(tmp_path_factory.mktemp("repository"))


def commands(text: str) -> list[str]:
    return [line.removeprefix("> stage ") for line in text.splitlines() if line.startswith("> ")]


def test_every_stage_runs_without_dvc_which_can_continue(repository):
    text = repository.stage("run --no-dvc")
    assert {*STAGES, "prepare sensitive", "plan", "ledger write", "report"} <= {*commands(text)}
    assert sorted(repository.opened()) == QUERIES
    repository.stage("ledger check --epsilon 1 --artifacts")
    assert repository.run("dvc", "commit")[0] == 0
    assert ran(repository.repro()) == set()
    assert commands(repository.stage("run --no-dvc")) == []


def test_stage_run_runs_changes_and_hides_disabled_stages(repository):
    repository.edit(synthesize={"count": 110})
    text = repository.stage("run")
    assert "leaked" not in text
    shown = commands(text)
    assert {name.split()[0] for name in shown} <= {
        "prepare",
        "plan",
        *AFTER,
    } and "synthesize" in shown
    assert sorted(repository.opened()) == QUERIES
    before = (repository.path / "dvc.lock").read_bytes()
    assert commands(repository.stage("run --no-dvc")) == []
    assert (repository.path / "dvc.lock").read_bytes() == before


def test_a_lost_release_is_restored_without_dvc_at_no_cost(repository):
    repository.run("rm", "-r", "artifacts/count")
    text = repository.stage("run --no-dvc", "restored, nothing is charged")
    assert commands(text) == ["count"]
    assert sorted(repository.opened()) == QUERIES


@pytest.mark.parametrize("words", ["run", "run --no-dvc", "run --no-dvc plan"])
def test_a_stage_that_fails_ends_the_run_with_its_exit_code(repository, words):
    edits = repository.edits
    repository.edit(privacy={"epsilon": 0})
    repository.stage(words, "privacy.epsilon=0 is not valid", code=2)
    repository.edits = edits
    repository.edit()


def test_targets_run_with_all_that_they_read():
    steps = without_dvc.read_steps(ROOT / "dvc.yaml")
    names = [step.name for step in without_dvc.chosen(steps, ["central"])]
    assert names == [
        name
        for name in names
        if name in ("prepare-sensitive", "prepare-public", "plan", "count", "central")
    ]
    assert names[-2:] == ["count", "central"] and len(names) == 5
    with pytest.raises(ConfigError, match="did you mean 'central'"):
        without_dvc.chosen(steps, ["centrall"])


@pytest.mark.parametrize(
    "more", [{"foreach": ["a"], "do": {"cmd": "true"}}, {"cmd": "echo ${item}"}]
)
def test_what_only_dvc_understands_is_refused(tmp_path, more):
    file = tmp_path / "dvc.yaml"
    file.write_text(yaml.safe_dump({"stages": {"mine": more}}))
    with pytest.raises(ConfigError, match="'mine' uses .* only DVC understands"):
        without_dvc.read_steps(file)


def test_stage_run_orders_the_stages_without_dvc(here, uninstall, monkeypatch):
    for name in ("params.yaml", "dvc.yaml"):
        (here / name).touch()
    ordered = []
    monkeypatch.setattr(without_dvc, "run_in_order", lambda *given: ordered.append(given))
    uninstall("dvc")
    run(["count"])
    assert ordered == [(here, ["count"])]
