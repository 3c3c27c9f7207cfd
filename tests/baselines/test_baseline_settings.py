"""Settings and plans of recipes with baselines."""

import pytest
from small_plan import card, params

from sfumato.errors import ConfigError
from sfumato.planning.checks import Setup
from sfumato.planning.resolve import make_plan
from sfumato.settings.release import Synthesize
from sfumato.settings.stages import STAGES


def test_a_removed_setting_is_named_with_its_value():
    removed = r"adversarial\.images was removed: .*is now always 10000"
    with pytest.raises(ConfigError, match=removed):
        make_plan(params(adversarial={"images": 40}), card())


@pytest.mark.parametrize(
    ("sources", "networks"),
    [({"evolve": 1}, set()), ({"finetune": 1, "adversarial": 1}, {"finetune", "adversarial"})],
)
def test_candidates_of_a_renderer_are_no_network(sources, networks):
    assert {*Synthesize(sources=sources).networks(False)} == networks


@pytest.mark.parametrize("stream", [True, False])
def test_a_stream_of_candidates_is_refused(stream):
    loaded = params(recipe="pe", profile=None, synthesize={"stream": stream})
    problems = STAGES["synthesize"].problems(Setup(loaded, card(), None))
    assert any("synthesize.stream requires a network" in problem for problem in problems) == stream
