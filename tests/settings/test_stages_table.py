"""The table of stages in the documents is the one that the code runs by."""

from pathlib import Path

from sfumato.settings.stages import stages_table

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference.md"


def test_the_reference_lists_the_stages_as_they_are():
    _, _, rest = REFERENCE.read_text(encoding="utf-8").partition("<!-- stages -->")
    listed, _, _ = rest.partition("<!-- /stages -->")
    assert listed.strip() == stages_table(), (
        "docs/reference.md: put what `sfumato.settings.stages.stages_table()` returns between the marks"
    )
