"""A short form of `benchmarks/kills.py`: a fault at every moment of the journal's entries, each kind in turn."""

import shutil

import pytest
from kills import Project, kinds_at, make_project, moments_of, strike_at
from small_repository import programs

from sfumato.settings.stages import STAGES


def as_dvc_does(project: Project, **more: str) -> tuple[int, str]:
    """The plan, and the query unless it has ended well. A fault comes after the plan, which writes no entry."""
    artifact = project.home / "artifacts" / project.query
    code, said = (0, "") if more else project.run("stage", "plan")
    if code == 0 and not (artifact / "privacy.json").exists():
        shutil.rmtree(artifact, ignore_errors=True)
        code, said = project.run("stage", project.query, **more)
    return code, said


@pytest.mark.parametrize(("query", "unit"), [("frequency", "image"), ("finetune", "group")])
def test_a_fault_at_any_entry_of_the_journal_costs_nothing(tmp_path, query, unit):
    project = make_project(tmp_path / "work", query, unit, programs())
    names = [*STAGES]
    for command in ("prepare sensitive", "prepare public", "plan", *names[: names.index(query)]):
        code, said = project.run("stage", *command.split())
        assert code == 0, said
    kept, wrong = project.keep("planned"), []
    for number, name in enumerate(moments_of(project, kept, as_dvc_does), start=1):
        (kind,) = kinds_at(number)
        try:
            strike_at(project, kept, as_dvc_does, kind, number)
        except AssertionError as error:
            wrong.append(f"{kind} at {number}, {name}: {str(error)[-600:]}")
    assert not wrong, "\n".join(wrong)
