"""The plan names queries that run in one process."""

from types import SimpleNamespace

import pytest

from sfumato.planning import make


@pytest.mark.parametrize(
    ("stages", "named"),
    [(["count", "evolve"], ["evolve"]), (["adversarial"], ["adversarial"]), (["finetune"], [])],
)
def test_the_plan_names_queries_that_run_in_one_process(monkeypatch, stages, named):
    monkeypatch.setattr(make, "warnings_of", lambda *given: [])
    card = SimpleNamespace(classes=("a", "b"))
    mechanisms = dict.fromkeys(stages)
    plan = SimpleNamespace(
        inherited=(), params=None, budget={"delta": 1e-5}, card=card, mechanisms=mechanisms
    )
    found = [*make.ProjectPlan.remarks(plan)]
    text = "runs in one process: if SFUMATO_LAUNCH is set, unset it for this stage"
    assert found == [f"{name} {text}" for name in named]
