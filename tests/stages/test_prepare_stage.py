"""`stage prepare`: without a terminal, all errors that could reveal who is in the set are the
same.
"""

import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def clinic(desk):
    """Write pictures of six persons in two classes.

    Returns a function that runs `stage prepare`. Its arguments are what to prepare, and
    `data.groups`.
    """
    random = np.random.default_rng(0)
    for number in range(24):
        for root in ("in", "public"):
            path = Path(root) / "ab"[number % 2] / f"Q{number % 6}-{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)

    def prepare(what="sensitive", **groups):
        desk.params(**{"data": {"groups": groups}, "privacy": {"unit": "group"}} if groups else {})
        return desk("prepare", what)

    desk.base = {
        "recipe": "teacher-public",
        "profile": None,
        "data": {"dataset_id": "clinic", "source": "imagefolder", "path": "in"},
        "privacy": {"epsilon": 10, "size_hint": 100},
        "public": {"source": "imagefolder", "path": "public", "declared_public": True},
    }
    return prepare


def test_a_pattern_that_fits_badly_is_refused_alike(clinic):
    Path("in/a/q0-99.png").write_bytes(Path("in/a/Q0-0.png").read_bytes())  # another spelling
    patterns = ["^(Q9)-", "^(Q3)-", r"^([Qq]\d)-"]
    said = set()
    reasons = []
    for pattern in patterns:
        said.add(clinic(pattern=pattern))
        reason, _, circumstances = Path("state/refused.txt").read_text().rpartition("\n\n")
        reasons.append(reason)
        assert time.strftime("%Y") in circumstances and "stage prepare" in circumstances
        assert Path("state/refused.txt").stat().st_mode & 0o777 == 0o600
    assert len(said) == 1 and len(set(reasons)) == 3
    code, text = said.pop()
    assert code == 4 and "refused.txt" in text and "Q" not in text


@pytest.mark.usefixtures("clinic")
def test_named_classes_that_differ_from_the_folders_are_shown(desk):
    for classes, different in (("ab", ""), ("ba", ""), ("axy", "b, x, y")):
        desk.params(data={"classes": [*classes]})
        text = desk.run("prepare sensitive", "2 classes")
        assert ("data.classes is not used" in text) == bool(different)
        assert different in text


@pytest.mark.parametrize("option", ["data.path", "data.groups.csv"])
def test_a_path_that_does_not_exist_is_named_in_a_log(clinic, desk, option):
    if option == "data.path":
        desk.params(data={"path": "gone"})
    else:
        desk.params(data={"groups": {"csv": "gone"}}, privacy={"unit": "group"})
    code, text = desk("prepare", "sensitive")
    assert code == 4 and text.startswith(f"error: {option}=gone does not exist: correct the path")
    missing = f"data.groups.csv={Path('gone.csv').resolve()} does not exist"
    said = desk.run("init in --out project --epsilon 5 --yes --groups gone.csv", missing, code=4)
    assert "refused.txt" not in said


def test_a_log_does_not_count_sensitive_public_images(clinic):
    assert clinic()[0] == 0
    said = set()
    for number in (2, 5):
        name = f"{'ab'[number % 2]}/Q{number % 6}-{number}.png"
        Path("public", name).write_bytes(Path("in", name).read_bytes())
        code, text = clinic("public")
        said.add(text)
        assert code == 4 and "refused.txt" in text and "public images are" not in text
        assert "24" not in text.replace(str(Path.cwd()), "")
        assert "of the 24 public images" in Path("state/refused.txt").read_text()
    assert len(said) == 1


def test_on_a_terminal_the_reason_is_shown(clinic, desk):
    desk.terminal = True
    code, text = clinic(pattern="^(Q9)-")
    assert code == 4 and "data.groups.pattern=^(Q9)- finds no id in 24 of 24 file names" in text


@pytest.mark.parametrize("command", ["init ~nosuch/x --epsilon 1 --yes", "prepare sensitive"])
def test_an_unknown_home_directory_is_one_sentence(desk, command):
    desk.params(
        recipe="dp-merf", data={"source": "imagefolder", "dataset_id": "a", "path": "~nosuch/x"}
    )
    desk.run(command, "begins with ~", code=4)
