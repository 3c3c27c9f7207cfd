"""What version 0.2 released stays known: its plans and records have schema 4."""

import json
from pathlib import Path

import pytest
from small_plan import NAMES, PROFILES, card, params

from sfumato.planning.resolve import make_plan
from sfumato.privacy.schema4 import as_now, table
from sfumato.settings.queries import Central, FeatureMap, Frequency
from sfumato.settings.stages import STAGES

# (plan, settings) digests of every query, by "recipe profile epsilon", as version 0.2 computed them
RECORDED = json.loads(Path(__file__).with_name("schema4_plans.json").read_text())


@pytest.mark.parametrize("case", [case for case in RECORDED if case.split()[0] in NAMES])
def test_records_of_schema_4_have_the_digests_that_their_plans_have_today(case):
    recipe, profile, epsilon = case.split()
    loaded = params(recipe=recipe, profile=profile, privacy={"epsilon": float(epsilon)})
    made = make_plan(loaded, card(loaded.data.name, PROFILES[profile]))
    found = {name: [entry.schema4["plan"], entry.schema4["settings"]] for name, entry in made.lineage.items()}
    assert found == RECORDED[case]


def test_a_plan_of_schema_4_means_what_it_meant():
    content = {"stage": "central", "enabled": True, "code": "f" * 64, "shape": [1, 8, 8]}
    then = table()["settings"]["central"]
    found = as_now({**content, "settings": {**then, "bins": 16}})
    del content["code"]
    assert found == {**content, "revision": 1, "settings": {"bins": 16}}


def test_a_phase_of_schema_4_is_read_without_what_is_gone():
    amp = {"radius": 0.05, "rate": 0.4, "steps": 1}
    common = {"steps": 10, "batch": 64, "learning_rate": 3e-4, "augment": 0}
    phases = [{"sources": {"public": 1.0}, **common, "amp": amp}, {"sources": {"central": 1.0}, **common, "amp": None}]
    found = as_now({"stage": "pretrain", "settings": {"phases": phases, "amp": amp}})["settings"]
    assert found["phases"][0]["amp"] == found["amp"] == {"radius": 0.05} and "amp" not in found["phases"][1]
    with pytest.raises(ValueError, match="rate"):
        as_now({"stage": "pretrain", "settings": {"phases": [phases[0] | {"amp": amp | {"rate": 0.5}}]}})


def test_every_setting_of_schema_4_is_read_or_was_removed_at_its_default():
    for stage, settings in table()["settings"].items():
        if stage in STAGES:
            assert as_now({"stage": stage, "settings": settings})["settings"] == {}, stage


def test_a_new_setting_moves_no_plan():
    class Wider(Central):
        dummy: int = 7

    class Grown(FeatureMap):
        another: float = 0.5

    class Wave(Frequency):
        features: tuple[Grown, ...] = (Grown(),)

    old = params(recipe="feta-pro")
    central, frequency = (Wider.model_validate(dict(old.central)), Wave.model_validate(old.frequency.model_dump()))
    new = old.model_copy(update={"central": central, "frequency": frequency})
    before, after = make_plan(old, card()), make_plan(new, card())
    assert after.files == before.files and after.lineage == before.lineage
