import shutil
from pathlib import Path

import pytest

from sfumato.planning.resolve import DOOR, MEASURED, code_of
from sfumato.settings.stages import QUERIES, STAGES
from sfumato.storage.digest import canonical, code_digest, digest_of, digest_of_file, import_closure

ROOT = Path(__file__).resolve().parents[2]


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
        "sfumato.training",
        "sfumato.diffusion",
        "sfumato.evaluation",
        "sfumato.data.sources",
        "sfumato.data.prepare",
        "sfumato.planning.resolve",
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


@pytest.fixture(scope="module")
def copied(tmp_path_factory) -> Path:
    """The project's code, to be edited."""
    root = tmp_path_factory.mktemp("code")
    for name in ("sfumato", "stages"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def queries_that_change(root: Path, file: str, old: str, new: str) -> set[str]:
    """The queries whose code digest is another after one edit, which is taken back."""
    path = root / file
    whole = path.read_text()
    assert old in whole, (file, old)
    before = {name: code_of(STAGES[name], root) for name in QUERIES}
    path.write_text(whole.replace(old, new, 1))
    try:
        return {name for name in QUERIES if code_of(STAGES[name], root) != before[name]}
    finally:
        path.write_text(whole)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("sfumato/queries/count.py", '"""', '"""Another. '),  # a docstring
        ("sfumato/storage/png.py", "), 2\n", "), 3\n"),  # a picture's gap
        ("sfumato/queries/central.py", "choose a divisor", "take a divisor"),  # the text of an error
        ("sfumato/privacy/charge.py", "nothing was drawn for this release", "no draw came before"),
        (
            "sfumato/privacy/accountant.py",
            "(4 + x / 4 for x in range(24))",
            "(4 + x / 8 for x in range(48))",
        ),  # its grid
        ("sfumato/privacy/checkpoint.py", ": resuming run", " goes on with run"),  # a progress line
        ("stages/finetune.py", "encoding the images, once", "encoding"),
        ("sfumato/runtime/compute.py", "THREADS_ROUNDS = 4", "THREADS_ROUNDS = 5"),  # what the machine does
        ("sfumato/runtime/compute.py", 'problem else "cuda"', 'problem else "cuda:1"'),  # the device
        ("sfumato/dpsgd/memory.py", "CPU_BYTES = 4", "CPU_BYTES = 8"),  # the chunk
        ("sfumato/settings/params.py", "machine(10)", "machine(20)"),
    ],
)
def test_what_decides_no_released_number_changes_no_query(copied, file, old, new):
    assert queries_that_change(copied, file, old, new) == set()


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        (
            "sfumato/dpsgd/clip.py",
            "norms + 1e-6",
            "norms + 1e-5",
            {"saliency", "finetune", "adversarial"},
        ),  # the clip's formula
        (
            "sfumato/features/scattering.py",
            "stride=2, padding=2",
            "stride=2, padding=1",
            {"frequency", "moments", "evolve", "adversarial", "teacher", "embedding"},
        ),  # a feature's constant
        ("sfumato/privacy/sampling.py", "sample_rate >= 1", "sample_rate > 1", set(QUERIES)),  # the sampler
        ("sfumato/privacy/noise.py", "GRID_BITS = 20", "GRID_BITS = 21", set(QUERIES)),
        ("sfumato/queries/histogram.py", "math.sqrt(votes)", "math.sqrt(2 * votes)", {"histogram"}),
    ],
)
def test_what_decides_released_numbers_changes_the_queries_concerned(copied, file, old, new, changed):
    assert queries_that_change(copied, file, old, new) == changed
