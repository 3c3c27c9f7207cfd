"""Plans of recipes with a public text-to-image model."""

import pytest
from small_plan import card, params

from sfumato.errors import ConfigError
from sfumato.planning.checks import Setup
from sfumato.planning.resolve import make_plan
from sfumato.settings.stages import STAGES


def test_a_public_model_refuses_rectangles_before_spending():
    with pytest.raises(ConfigError, match="draws only square images, not 8×12"):
        make_plan(params(recipe="dp-lora", model={"directory": "model"}), card(shape=(1, 8, 12)))


@pytest.mark.parametrize("stream", [True, False])
def test_a_stream_of_a_public_model_is_refused(stream):
    loaded = params(recipe="dp-lora", profile=None, synthesize={"stream": stream})
    problems = STAGES["synthesize"].problems(Setup(loaded, card(), None))
    assert any("synthesize.stream requires a network" in problem for problem in problems) == stream
