"""From scans to a release: `stage init` with --yes, and the stages that follow."""

import json
from pathlib import Path

import pytest
import yaml
from scans import phantom, write_bids, write_series

from sfumato.release.loading import load_release
from sfumato.settings.recipes import overlaid

SMALL = {
    "frequency": {"size": 100},
    "auxiliary": {"steps": 3, "batch": 20, "images": 40, "width": 8},
}
SMALL["synthesize"] = {"count": 40, "export": []}


def write_clinic(root):
    for person in range(24):
        write_series(
            root / ("zero", "one")[person % 2] / f"{person}",
            phantom(person),
            f"P{person}",
            f"1.{person}",
        )


@pytest.mark.parametrize("options, write", [("", write_bids), ("--range 0,4080", write_clinic)])
def test_scans_become_a_release_that_protects_persons(
    options, write, desk, quick, environment, tmp_path_factory
):
    scans = tmp_path_factory.mktemp("owner") / "scans"
    write(scans)
    environment["SFUMATO_STATE"] = str(scans.with_name("state"))  # outside the project
    desk.run(f"init {scans} --epsilon 5 --minutes 3 --yes {options}")
    made = yaml.safe_load(Path("params.yaml").read_text())
    assert made["data"]["volume"]["step"] == 1 and made["privacy"]["unit"] == "group"
    Path("params.yaml").write_text(yaml.safe_dump(overlaid(made, SMALL)))
    desk.run_all(
        "prepare sensitive",
        "plan",
        "prepare public",
        "count",
        "frequency",
        "auxiliary",
        "synthesize",
    )
    card = json.loads(Path("data/sensitive/card.json").read_text())
    assert (card["unit"], card["classes"]) == ("group", ["one", "zero"])
    assert len(load_release(Path("artifacts/synthesize"))) == 40
    committed = Path("params.yaml").read_text() + json.dumps(card)
    assert "sub-0" not in committed and "P1" not in committed
