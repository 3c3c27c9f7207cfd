"""A plan announces minutes for exactly the stages that would run."""

from small_plan import card, params
from small_record import small_record

from sfumato.planning.kept import Past, spending_of
from sfumato.planning.resolve import make_plan, plan_texts
from sfumato.privacy.odometer import CLOSE, Run
from sfumato.settings.stages import STAGES


def test_minutes_count_only_stages_that_will_run(tmp_path):
    """An earlier version announced 48.3 minutes for a second run that took 5.4."""
    made = make_plan(params(), card())
    out = tmp_path / "artifacts" / "plan"
    artifacts = tmp_path / "artifacts"
    spent = [
        small_record(number, mechanism, stage=name, plan=made.lineage[name].plan)
        for number, (name, mechanism) in enumerate(made.mechanisms.items())
    ]
    runs = [Run({"record": record, "plan": record["plan"]}, record, end=CLOSE) for record in spent]

    def coming(released=runs, **edit):
        past = Past(state=tmp_path, folder=tmp_path, runs=released, terms={})
        return spending_of(make_plan(params(**edit), card(), None, released), past, out)[1]

    assert coming([]) == {*STAGES}, "at first all"
    for name in STAGES:
        (artifacts / name).mkdir(parents=True)
    out.mkdir()
    for name, text in plan_texts(made).items():
        (out / name).write_text(text)
    assert coming() == set()
    assert coming([]) >= {*made.mechanisms}, "and all queries of images that nothing was spent on"
    assert coming(synthesize={"count": 50}) == {"synthesize", "student", "evaluate"}
    assert coming(pretrain={"steps": 5}) == {
        "pretrain",
        "saliency",
        "finetune",
        "synthesize",
        "student",
        "evaluate",
    }
    (artifacts / "count").rmdir()
    (artifacts / "synthesize").rmdir()
    assert coming() == {"synthesize", "student", "evaluate"}, "a release is restored at once"
