"""`stage brief`: the request for permission, before ε is spent."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from opened_files import opened_files
from PIL import Image
from small_plan import card, params
from test_recipes import SMALL

from sfumato.planning.brief import release_facts
from sfumato.privacy.ledger import read_ledger
from sfumato.release.report import what_it_means
from sfumato.settings.recipes import overlaid
from sfumato.settings.stages import STAGES

PERSONS = {
    "data": {
        "dataset_id": "scans",
        "source": "imagefolder",
        "path": "in",
        "groups": {"pattern": r"^(p\d+)_"},
    },
    "privacy": {"unit": "group"},
}


@pytest.fixture
def scans(desk, digits):
    """Write pictures of 60 persons, not prepared yet."""
    for i in range(180):
        path = Path("in", str(digits.labels[i]), f"p{i % 60}_{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.images[i, ..., 0]).save(path)
    desk.base = overlaid(SMALL, {**PERSONS, "recipe": "dp-merf"})
    desk.base["data"] |= {"size": 8, "channels": 1}
    desk.params(privacy={"size_hint": 60})
    return desk


def test_no_image_is_read(scans):
    with opened_files() as opened:
        scans.run("brief", "brief.html", "release.legal_basis")
    assert not [name for name in opened if name.endswith(".png")]
    assert not Path("state/data").exists() and not Path("artifacts").exists()


def test_the_bounds_equal_the_releases(scans):
    scans.run("brief")
    before = Path("brief/brief.md").read_text()
    scans.run_all("prepare sensitive", "prepare public", "plan")
    scans.run_all(*(name for name in STAGES if name != "evaluate"))
    scans.run("ledger write")
    attacker = what_it_means(read_ledger(Path("ledger.json")))
    assert (
        f"at most {attacker['guess']} % of the time" in before
        and f"**{attacker['strength']}**" in before
    )
    assert (
        "all images of one person with their labels" in before
        and "nothing, according to the journal" in before
    )
    scans.run("brief")
    assert "2 measurements, according to the journal" in Path("brief/brief.md").read_text()


def test_answers_cannot_change_the_page(scans):
    scans.params(
        privacy={"size_hint": 60},
        release={
            "purpose": "<script>x</script> | [a](b) `c`",
            "incident_contact": "privacy@hospital.example",
        },
    )
    text = scans.run("brief")
    assert "release.purpose" not in text and "release.incident_contact" not in text
    page = Path("brief/brief.html").read_text()
    assert "<script" not in page and "&lt;script&gt;x&lt;/script&gt; | [a](b) `c`" in page
    assert "privacy@hospital.example" in page


def test_no_sentence_claims_that_a_law_is_met(scans):
    scans.run("brief")
    text = Path("brief/brief.md").read_text()
    assert "does not state that a law or a standard is met" in text
    for criterion in (
        "Singling out",
        "Linkability",
        "Inference",
        "6.2",
        "7.3",
        "8.2",
        "9.4",
        "Trust model",
    ):
        assert f"| {criterion}" in text
    assert not any(word in text.lower() for word in ("compl", "conform", "guarantees that the law"))


@pytest.mark.parametrize(
    ("synthesize", "words"),
    [
        ({"sources": {"finetune": 1.0}}, "synthetic images"),
        ({"sources": {"select": 1.0}}, "privately selected public images"),
        (
            {"sources": {"finetune": 1.0, "select": 1.0}},
            "synthetic and privately selected public images",
        ),
        (
            {"sources": {"finetune": 1.0, "select": 1.0}, "choose": True},
            "synthetic images (and privately selected",
        ),
    ],
)
def test_public_images_are_counted_as_the_release_counts(synthesize, words):
    """With `choose`, public images are added to the `count` drawn ones; without it, they are
    part of `count`.
    """
    made = SimpleNamespace(
        params=params(synthesize={"count": 600, **synthesize}), card=card(), mechanisms={}
    )
    shared = release_facts(made)
    assert shared["images"] == "600" and shared["kind"].startswith(words)
