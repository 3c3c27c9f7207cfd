"""Run short forms of two scripts.

`benchmarks/kills.py` causes a fault while a journal entry is written. Its test uses all kinds of
fault in turn. `benchmarks/file_kills.py` causes a kill or a power cut when a path in DECIDE is
renamed or removed.
"""

import shutil

import pytest
from faults import KINDS, MOMENTS
from file_kills import CASES, sweep
from kills import Project, kinds_at, make_project, moments_of, strike_at
from small_repository import programs

from sfumato.settings.stages import STAGES


def as_dvc_does(project: Project, **more: str) -> tuple[int, str]:
    """Run the plan, and the query unless it has released. Returns the exit code and the output.

    more: the environment variable that requests a fault, or nothing. With a fault, only the query
    is run, because the plan writes no journal entry.
    """
    artifact = project.home / "artifacts" / project.query
    code, said = (0, "") if more else project.run("stage", "plan")
    if code == 0 and not (artifact / "privacy.json").exists():
        shutil.rmtree(artifact, ignore_errors=True)
        code, said = project.run("stage", project.query, **more)
    return code, said


@pytest.mark.parametrize(
    ("query", "unit", "every"), [("frequency", "image", 1), ("finetune", "group", 3)]
)
def test_a_fault_at_any_entry_of_the_journal_costs_nothing(tmp_path, query, unit, every):
    """With DP-SGD, only every third moment is tested. Each kind of fault still occurs, and so does
    each of the four moments of an entry. The script tests all moments.
    """
    project = make_project(tmp_path / "work", query, unit, programs())
    names = [*STAGES]
    for command in ("prepare sensitive", "prepare public", "plan", *names[: names.index(query)]):
        code, said = project.run("stage", *command.split())
        assert code == 0, said
    kept = project.keep("planned")
    wrong = []
    moments = [*enumerate(moments_of(project, kept, as_dvc_does), start=1)][::every]
    assert {name.split()[-1] for _, name in moments} == {*MOMENTS} and len(moments) >= len(KINDS)
    for turn, (number, name) in enumerate(moments, start=1):
        (kind,) = kinds_at(turn)
        try:
            strike_at(project, kept, as_dvc_does, kind, number)
        except AssertionError as error:
            wrong.append(f"{kind} at {number}, {name}: {str(error)[-600:]}")
    assert not wrong, "\n".join(wrong)


# Case -> endings of paths. The process is killed when such a path is renamed or removed
DECIDE = {
    "prepare": ("keys/photos.journal", "keys/photos", "data/photos"),
    "prepare again": ("data/.photos.old", "data/photos", ".photos.old/holdout"),
    "count": ("keys/photos.journal", "released", "artifacts/count"),
    "ledger write": ("ledger.json",),
    "forget": ("keys/photos.journal",),
    "merge": ("artifacts/count", "dvc.yaml"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_kill_or_power_cut_at_a_file_event_costs_nothing(tmp_path, name):
    struck = tuple(f"/{end}" for end in DECIDE[name])
    chosen = lambda event: event.startswith(("rename ", "rmdir ")) and event.endswith(struck)  # noqa: E731
    tried, wrong = sweep(name, tmp_path, programs(), chosen)
    assert not wrong, "\n".join(wrong)
    assert tried["events"] > len(struck) and tried["killed"] and tried["lost"]
