"""In a new project, the number of images of each class gets a share of the budget. An existing
project keeps its noise.
"""

import re
from pathlib import Path

import yaml

from sfumato.planning.proposal import PROPOSALS
from sfumato.settings.noise import parse_noise
from sfumato.settings.params import Params
from sfumato.settings.queries import Count

ROOT = Path(__file__).resolve().parent.parent.parent


def is_share(noise) -> bool:
    return str(parse_noise(noise)).endswith("%")


def test_every_row_that_init_proposes_gives_count_a_share():
    rows = PROPOSALS["rows"]
    assert [row["name"] for row in rows if not is_share(row["params"]["count"]["noise"])] == []


def test_every_profile_gives_count_a_share():
    for file in (ROOT / "pipelines/profiles").glob("*.yaml"):
        assert is_share(yaml.safe_load(file.read_text())["count"]["noise"]), file.name
    for page in ("docs/howto.md", "docs/public-models.md"):
        blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        own = [yaml.safe_load(block) for block in blocks if "profile: null" in block]
        assert own and all(is_share(block["count"]["noise"]) for block in own), page
    line = next(
        line
        for line in (ROOT / "params.yaml").read_text().splitlines()
        if line.startswith("# count:")
    )
    assert is_share(yaml.safe_load(line.removeprefix("# "))["count"]["noise"])


def test_a_missing_key_means_what_it_meant_at_release():
    """If the default of `count.noise` changed, a project without this key would get another
    mechanism and another digest, so it would pay for its counts again.
    """
    assert Count().noise == 50.0 and Params.model_validate({}).count.noise == 50.0
