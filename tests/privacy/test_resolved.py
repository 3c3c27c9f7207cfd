import json

import pytest

from sfumato.errors import ConfigError
from sfumato.privacy.resolved import LINEAGE, Lineage, read_lineage, read_stage_plan

WHOLE = (
    "stage: count\nenabled: true\ndataset_id: d\nshape: [1, 8, 8]\nclasses: [a, b]\nsize_hint: "
    "100\nsettings: {}\nmechanism: {noise_multiplier: 2.0}\n"
)


def test_a_resolved_stage_is_typed_and_known_by_its_content(tmp_path):
    path = tmp_path / "count.yaml"
    path.write_text(WHOLE)
    plan = read_stage_plan(path, "count")
    assert plan.mechanism.noise_multiplier == 2.0 and plan.shape == (1, 8, 8)
    path.write_text(WHOLE.replace("2.0", "3.0"))
    assert read_stage_plan(path, "count").digest != plan.digest
    with pytest.raises(ConfigError, match="plan of count contains no network"):
        assert plan.network


@pytest.mark.parametrize(
    "text",
    ["", "stage: [", "stage: count\n", WHOLE.replace("settings: {}", "settings: {colour: 1}")],
)
def test_what_cannot_be_used_is_named(tmp_path, text):
    path = tmp_path / "count.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"count\.yaml"):
        read_stage_plan(path, "count")


def test_a_lineage_of_version_0_3_is_read(tmp_path):
    lineage = {"plan": "a" * 64, "again": 1, "schema4": {"plan": "b" * 64, "settings": "c" * 64}}
    (tmp_path / LINEAGE).write_text(json.dumps({"count": lineage}))
    assert read_lineage(tmp_path, "count") == Lineage(plan="a" * 64, again=1)
