"""Each release of the gallery is valid by its own ledger, and its pages describe only that
release.
"""

import contextlib
import hashlib
import io
import json
import re
from pathlib import Path

import pytest
from program import call

from sfumato.privacy.ledger import by_id, read_ledger

GALLERY = Path(__file__).resolve().parents[1] / "docs" / "gallery"
ROW = re.compile(r"^\| (\w+) \|.*\| ([\d.]+) \| \[report\]", re.MULTILINE)
RELEASES = dict(ROW.findall((GALLERY / "README.md").read_text()))


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_every_release_has_its_row():
    assert {*RELEASES} == {path.name for path in GALLERY.iterdir() if path.is_dir()} and len(
        RELEASES
    ) == 5
    assert sum(file.stat().st_size for file in GALLERY.rglob("*")) < 6_100_000


@pytest.mark.parametrize(("name", "epsilon"), RELEASES.items())
def test_the_ledger_is_valid_at_the_stated_epsilon(name, epsilon, here):
    from stages.cli import main

    for bound, code in ((epsilon, 0), (str(0.9 * float(epsilon)), 3)):
        screen = io.StringIO()
        with contextlib.chdir(GALLERY / name):
            found = call(
                main, "stage", "ledger", "check", "--ledger-only", "--epsilon", bound, screen=screen
            )
        assert found == code, screen.getvalue()
    assert json.loads((GALLERY / name / "card.json").read_text())["epsilon"] <= float(epsilon)


@pytest.mark.parametrize("name", RELEASES)
def test_the_files_belong_to_the_release_and_its_ledger(name):
    folder = GALLERY / name
    privacy = json.loads((folder / "privacy.json").read_text())
    page = (folder / "report.html").read_text()
    for file in ("README.md", "card.json", "grid.png"):
        assert sha256(folder / file) == privacy["files"][file]
    for file in ("privacy.json", "ledger.json"):
        assert sha256(folder / file) in page
    assert privacy["records"].items() <= by_id(read_ledger(folder / "ledger.json")).items()


@pytest.mark.parametrize("name", RELEASES)
def test_the_table_holds_the_first_images_of_the_card(name):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    from PIL import Image

    card = json.loads((GALLERY / name / "card.json").read_text())
    shown = 1000 if card["shape"][1] * card["shape"][2] <= 32 * 32 else 100
    table = pandas.read_parquet(GALLERY / name / f"first-{shown}.parquet")
    assert len(table) == shown and {*table.label} == {*range(len(card["classes"]))}
    with Image.open(io.BytesIO(table.image[0]["bytes"])) as image:
        assert image.size == tuple(card["shape"][:0:-1])
