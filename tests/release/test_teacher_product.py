"""The teacher for its recipients: a classifier with its classes and its cost. Changed files are
refused.
"""

import numpy as np
import pytest
import torch
from PIL import Image
from small_release import RECORD, write_teacher

import sfumato
from sfumato.errors import DataError
from sfumato.storage.artifacts import write_empty


@pytest.fixture
def folder(digits, tmp_path):
    return write_teacher(tmp_path / "teacher", digits)


def test_it_names_the_class_of_images_as_files_hold_them(folder, digits):
    teacher = sfumato.load_teacher(folder)
    found = teacher.probabilities(digits.images[:600])
    assert found.shape == (600, 10) and np.allclose(found.sum(axis=1), 1, atol=1e-5)
    assert (found.argmax(axis=1) == digits.labels[:600]).mean() > 0.7
    assert teacher.classes == digits.classes and teacher.ledger == {RECORD["id"]: RECORD}
    for other in ([*digits.images[:600]], torch.from_numpy(digits.images[:600])):
        assert np.array_equal(teacher.probabilities(other), found)
    for wrong in (digits.images[:4] / 255, digits.images[:4, :6], digits.images[:4, ..., 0]):
        with pytest.raises(DataError, match=r"the classifier expects uint8 \(N, 8, 8, 1\)"):
            teacher.probabilities(wrong)


def test_it_names_the_class_of_a_file_of_any_size(folder, digits, tmp_path):
    teacher = sfumato.load_teacher(folder)
    label = digits.labels[6]
    Image.fromarray(digits.images[6, :, :, 0]).resize((40, 40)).convert("RGB").save(
        tmp_path / "x.png"
    )
    assert teacher.predict(tmp_path / "x.png") == teacher.predict(digits.images[6]) == str(label)
    teacher.network.several, teacher.network.offsets = True, torch.full((10,), -2.0)
    likely = np.flatnonzero(teacher.probabilities(digits.images[6:7])[0] > 0.5)
    assert teacher.predict(digits.images[6]) == tuple(map(str, likely)) and 0 < len(likely) < 10


def test_its_cards_state_the_cost_and_others_may_read_every_file(folder):
    teacher = sfumato.load_teacher(folder)
    text = (folder / "README.md").read_text()
    assert 0 < teacher.card["epsilon"] < 2 and "one image with its label, added or removed" in text
    assert (
        f"δ = {teacher.card['delta']:.3g}"[:8] in text
        and "| count | counts |" in text
        and "| 9 | 9 |" in text
    )
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert len(modes) == 1, "weights as the other files"


@pytest.mark.parametrize(
    "name",
    [".DS_Store", "Thumbs.db", ".git/HEAD", ".cache/hub/x.json", "LICENSE", ".gitattributes"],
)
def test_files_added_by_a_hub_or_a_browser_do_no_harm(folder, name):
    assert (folder / ".gitattributes").read_text() == "* -text\n"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("added")
    assert sfumato.load_teacher(folder)
    (folder / ".gitattributes").unlink()
    assert sfumato.load_teacher(folder)
    for opened in ("own-network", "more.safetensors"):
        (folder / opened).write_bytes(b"0")
        with pytest.raises(DataError, match=f"{opened} is not among the files"):
            sfumato.load_teacher(folder)
        (folder / opened).unlink()
    (folder / "README.md").unlink()
    with pytest.raises(DataError, match=r"README\.md is missing"):
        sfumato.load_teacher(folder)


def test_a_changed_foreign_or_empty_one_is_refused(folder, tmp_path):
    (folder / "card.json").write_text("{}")
    with pytest.raises(DataError, match=r"card\.json no longer has the bytes"):
        sfumato.load_teacher(folder)
    write_empty(tmp_path / "off", "teacher")
    write_empty(tmp_path / "other", "select")
    for name, why in (("off", "contains no teacher"), ("other", "was written by `select`")):
        with pytest.raises(DataError, match=why):
            sfumato.load_teacher(tmp_path / name)
