from pathlib import Path

import pytest

from sfumato.digest import canonical, code_digest, digest_of, digest_of_file, import_closure
from sfumato.plan import DOOR, MEASURED

ROOT = Path(__file__).resolve().parent.parent


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def tree(tmp_path) -> Path:
    write(tmp_path, "sfumato/__init__.py", "")
    write(tmp_path, "sfumato/formula.py", '"""What."""\n\ndef double(x):\n    """Twice."""\n    return 2 * x\n')
    write(tmp_path, "sfumato/other.py", "def unused():\n    return 1\n")
    write(tmp_path, "stages/count.py", "def count():\n    from sfumato.formula import double\n    return double(1)\n")
    return tmp_path


def test_comments_docstrings_and_blank_lines_change_nothing(tree):
    before = code_digest(tree, "stages.count")
    write(
        tree,
        "sfumato/formula.py",
        '"""Something else."""\n# why\n\n\n'
        'def double(x):\n    """Two times.\n\n    Long."""\n    return 2 * x  # here\n',
    )
    assert code_digest(tree, "stages.count") == before


def test_a_changed_formula_in_an_import_deep_inside_is_seen(tree):
    before = code_digest(tree, "stages.count")
    write(tree, "sfumato/formula.py", "def double(x):\n    return 3 * x\n")
    assert code_digest(tree, "stages.count") != before


def test_a_module_that_is_not_imported_does_not_matter(tree):
    before = code_digest(tree, "stages.count")
    write(tree, "sfumato/other.py", "def unused():\n    return 2\n")
    assert code_digest(tree, "stages.count") == before


@pytest.mark.parametrize("stage", ["count", "central", "frequency"])
def test_queries_do_not_depend_on_what_comes_after_them(stage):
    """Editing training, sampling, metrics or the sources of images must not make a query spend again."""
    seen = import_closure(ROOT, f"stages.{stage}", DOOR, without=MEASURED)
    later = (
        "sfumato.dpsgd",
        "sfumato.warmup",
        "sfumato.diffusion",
        "sfumato.evaluation",
        "sfumato.data.sources",
        "sfumato.data.prepare",
        "sfumato.plan",
        "sfumato.release.synthesis",
    )
    assert "sfumato.privacy.charge" in seen
    assert [name for name in seen if name in later or name.startswith(tuple(f"{x}." for x in later))] == []


def test_a_module_that_is_not_there_is_an_error(tree):
    with pytest.raises(ValueError, match=r"stages\.cuont"):
        code_digest(tree, "stages.cuont")


def test_canonical_form_ignores_order_and_refuses_nan():
    assert digest_of({"a": 1, "b": [1.5]}) == digest_of({"b": [1.5], "a": 1})
    with pytest.raises(ValueError, match="JSON"):
        canonical(float("nan"))


def test_a_file_is_known_by_its_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "b").write_bytes(b"x")
    assert digest_of_file(tmp_path / "a") == digest_of_file(tmp_path / "b")
