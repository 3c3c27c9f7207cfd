"""`docs/api.md`: its generated parts are those of the code, all parameters are described, and its
examples run.
"""

import re
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image
from small_release import write_release, write_teacher
from test_docs import generate as generate

from sfumato.data.prepare import prepare_sensitive
from sfumato.settings.data import Data

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
# Of the examples, in the test
PLACES = {"/home/me/.local/state/sfumato": "digits-state", "/data/clinic": "images"}


def test_the_page_is_that_of_the_code(generate):
    assert generate.fresh_pages()[PAGE] == PAGE.read_text(encoding="utf-8"), (
        "run python docs/generate.py"
    )


def test_every_parameter_of_a_public_name_is_described(generate):
    shown = [
        section
        for found in generate.api.sections(PAGE.read_text(), generate.table, generate.comments_of)
        for section in found
    ]
    assert len(shown) > 40
    assert [
        f"{section.name} {row[0]}" for section in shown for row in section.rows if not row[3]
    ] == []
    assert [section.name for section in shown if not section.docstring.prose] == []


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        (
            "Sum.\n\nrows: (B, a), as floats; size: of a batch.",
            {"rows": "(B, a), as floats", "size": "of a batch."},
        ),
        (
            "Sum.\n\na, b: two numbers. Returns c. Raises DataError if not.",
            {"a": "two numbers.", "b": "two numbers."},
        ),
        ("Sum of what `charge: x` gives.", {}),
        (
            "Sum.\n\nArgs:\n    rows: (B, a),\n        as floats.\n    *sizes: of a batch.\n\n"
            "Returns:\n    c.\n\nRaises:\n    DataError: if not.",
            {"rows": "(B, a), as floats.", "sizes": "of a batch."},
        ),
    ],
)
def test_a_docstring_is_read_in_its_parts(generate, docstring, expected):
    def work() -> None: ...

    work.__doc__ = docstring
    found = generate.api.parsed(work)
    assert found.parameters == expected and found.prose[0].startswith("Sum")
    raised = "DataError: if not." if "Args:" in docstring else "DataError if not."
    assert found.clauses == ({"Returns": "c.", "Raises": raised} if "Returns" in docstring else {})


@pytest.fixture
def project(digits, here, environment):
    """What the examples name: a release, a teacher, a ledger, a folder of images, a state
    directory.
    """
    environment["DVC_SITE_CACHE_DIR"] = str(here / "dvc")
    environment["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    write_release(here / "artifacts" / "synthesize", digits)
    write_teacher(here / "artifacts" / "teacher", digits)
    shutil.copy(ROOT / "docs/gallery/digits/ledger.json", here)
    state = here / PLACES["/home/me/.local/state/sfumato"]
    prepare_sensitive(Data(), state, here / "data" / "sensitive" / "card.json", here / "raw")
    for i in range(40):
        folder = here / "images" / digits.classes[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.images[i, :, :, 0]).save(folder / f"{i}.png")
    return here


def test_the_examples_run_one_after_the_other(project, capsys):
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 15
    names: dict = {}
    for block in blocks:
        for place, here in PLACES.items():
            block = block.replace(place, str(project / here))
        exec(compile(block, str(PAGE), "exec"), names)
    assert "1.2000" in capsys.readouterr().out
