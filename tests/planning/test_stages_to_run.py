"""Which stages a plan would run: those whose minutes are announced."""

from small_plan import card, params

from sfumato.planning.kept import Spending, stages_to_run
from sfumato.planning.resolve import make_plan, plan_texts
from sfumato.settings.stages import STAGES


def test_minutes_are_those_of_stages_that_will_run(tmp_path):
    """After a run, 48.3 minutes were announced where 5.4 were taken."""
    made = make_plan(params(), card())
    out, artifacts = tmp_path / "artifacts" / "plan", tmp_path / "artifacts"

    def coming(*released, **edit):
        after = make_plan(params(**edit), card())
        spending = [Spending(stage=name, done="x", cause=None, left_open=False) for name in released]
        return stages_to_run(after, spending, out, artifacts)

    assert coming() == {*STAGES}, "at first all"
    for name in STAGES:
        (artifacts / name).mkdir(parents=True)
    out.mkdir()
    for name, text in plan_texts(made).items():
        (out / name).write_text(text)
    assert coming() == set()
    assert coming(synthesize={"count": 50}) == {"synthesize", "evaluate"}
    assert coming(pretrain={"steps": 5}) == {"pretrain", "saliency", "finetune", "synthesize", "evaluate"}
    (artifacts / "count").rmdir()
    (artifacts / "synthesize").rmdir()
    assert coming("count") == {"synthesize", "evaluate"}, "a release is put back in no time"
