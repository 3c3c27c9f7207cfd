"""`make lint` finds each kind of sentence to avoid, and the project has no more of them than
`kinds.yaml` allows.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from check import ROOT, Kind, found_in, kinds, problems, texts_of

KINDS = {kind.name: kind for kind in kinds()}
PLACES = {
    "README.md",
    "CHANGELOG.md",
    "docs/howto.md",
    "paper/paper.md",
    "pipelines/x.yaml",
    "sfumato/release/words.yaml",
    "stages/x.md",
    ".github/ISSUE_TEMPLATE/bug.yml",
}


def planted(kind: Kind, folder: Path) -> Path:
    """Write a module with the example of a kind below `folder`. Returns `folder`."""
    quoted = (
        f'X = "{kind.example}, of course"'
        if {"strings", "docstrings"} <= {*kind.sorts}
        else kind.example
    )
    (folder / "sfumato").mkdir()
    (folder / "sfumato/x.py").write_text(quoted + "\n")
    return folder


def test_the_project_has_no_sentence_of_any_kind():
    assert problems(ROOT) == []


@pytest.mark.parametrize("name", KINDS)
def test_a_planted_sentence_is_found_by_its_kind(name, tmp_path):
    found = problems(planted(KINDS[name], tmp_path))
    assert [line for line in found if line.startswith(f"sfumato/x.py:1: {name}: ")]


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if "pages" in kind.sorts])
def test_a_planted_sentence_is_found_in_each_page(name, tmp_path):
    for place in PLACES:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(f"First line.\n{KINDS[name].example}\n")
    found = {line.split(":2: ")[0] for line in problems(tmp_path) if f":2: {name}: " in line}
    assert found == PLACES


@pytest.mark.parametrize("sentence", ["Nobody reads it.", "Says the ledger.", "Those of the plan."])
def test_a_sentence_is_found_if_it_begins_with_the_word(sentence, tmp_path):
    (tmp_path / "README.md").write_text(f"{sentence}\n")
    assert len(problems(tmp_path)) == 1


def test_code_in_a_sentence_does_not_count(tmp_path):
    (tmp_path / "x.md").write_text(
        "Call `say`, or {{ said }}, or [a link](#mends-nobody) <b title='told'>.\n"
    )
    texts = [*texts_of(tmp_path / "x.md", "x.md")]
    assert [found_in(kind, texts) for kind in KINDS.values()] == [[]] * len(KINDS)


def test_an_allowed_fragment_counts_up_to_its_number(tmp_path):
    kind = KINDS["homely verbs"]
    (tmp_path / "x.md").write_text("We hold the lock.\nThey hold the lock.\nThey hold the lock.\n")
    found = found_in(kind, [*texts_of(tmp_path / "x.md", "x.md")])
    assert [text.place for text in found] == ["x.md:2", "x.md:3"] and kind.allowed[
        "hold the lock"
    ] == 1


def test_lint_fails_on_a_planted_sentence_and_prints_its_place(tmp_path):
    planted(KINDS["oaths"], tmp_path)
    (tmp_path / "tests/language").mkdir(parents=True)
    for file in ("check.py", "kinds.yaml"):
        (tmp_path / "tests/language" / file).write_text(
            (ROOT / "tests/language" / file).read_text()
        )
    command = [sys.executable, "tests/language/check.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stdout.startswith("sfumato/x.py:1: oaths: ")
    lint = (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0]
    assert " ".join(command[1:]) in lint and "make lint" in (ROOT / ".ci/run").read_text()
