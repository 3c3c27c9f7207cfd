"""On a narrow terminal, no word is cut, and no character is lost."""

import io

import pytest
from program import Terminal

from stages.screen import wrapped

LINES = """local    4190 images in 2 classes
         ├─ 2121 persons, by pattern ^([A-Za-z]+-?\\d+)_\\d+\\. of the names of files
public   that the dataset exists, its class names (normal, pneumonia), and privacy.size_hint=2000

risk: who guesses is right at most 86 % of the time (a coin: 50 %); see \
/a/very/long/path/of/more/than/forty/columns"""


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
def test_lines_break_between_words_with_an_indent(columns, environment):
    environment["COLUMNS"] = str(columns)
    shown = wrapped(LINES, Terminal())
    assert shown.split() == LINES.split(), "no word is cut"
    assert all(
        len(line) <= columns or len(line.split()) == 1 or columns < 40
        for line in shown.splitlines()
    )
    if columns == 60:
        assert (
            "\n            of the names of files\n" in shown and "\n         pneumonia)," in shown
        )
    assert wrapped(LINES, io.StringIO()) == LINES, "a log has its lines as they are"
