"""A folder with one folder of pictures per class: what is read, and what is refused by name."""

import numpy as np
import pytest
from PIL import Image
from writers import read_all, read_all_public, write_folder, write_npz

from sfumato.config import Data, Public
from sfumato.data.sources import read_source
from sfumato.errors import ConfigError, DataError


def test_a_folder_gives_its_classes_and_pictures_by_name(tmp_path):
    root = write_folder(tmp_path / "in", classes=("dog", "cat"))
    (root / ".hidden").mkdir()
    (root / "cat" / ".DS_Store").write_bytes(b"x")
    (root / "README.txt").write_text("about")
    source, images, labels = read_all(Data(source="imagefolder", path=str(root)), tmp_path)
    assert source.classes == ("cat", "dog") and labels == [0, 0, 0, 1, 1, 1] and source.test is None
    assert np.array_equal(images[4], np.asarray(Image.open(root / "dog" / "1.png")))


def test_sixteen_bit_grey_keeps_its_scale_and_transparency_is_black(tmp_path):
    root = write_folder(tmp_path / "in", shape=(2, 2, 1))
    Image.fromarray(np.array([[0, 255], [256, 65535]], np.uint16)).save(root / "cat" / "0.png")
    Image.fromarray(np.array([[[255, 0], [255, 255]], [[100, 255], [0, 255]]], np.uint8), "LA").save(
        root / "cat" / "1.png"
    )
    _, images, _ = read_all(Data(source="imagefolder", path=str(root)), tmp_path)
    assert images[0][..., 0].tolist() == [[0, 0], [1, 255]]
    assert images[1][..., 0].tolist() == [[0, 255], [100, 0]]


def spoil_corrupt(root):
    (root / "dog" / "1.png").write_bytes((root / "dog" / "1.png").read_bytes()[:60])


def spoil_text(root):
    (root / "dog" / "notes.txt").write_text("no picture")


def spoil_sizes(root):
    Image.new("RGB", (7, 6)).save(root / "dog" / "1.png")


def spoil_modes(root):
    Image.new("L", (6, 6)).save(root / "dog" / "1.png")


def spoil_frames(root):
    frames = [Image.new("L", (6, 6), value) for value in (0, 90, 180)]
    frames[0].save(root / "dog" / "1.gif", save_all=True, append_images=frames[1:])


def spoil_depth(root):
    Image.fromarray(np.zeros((6, 6), np.float32)).save(root / "dog" / "1.tiff")


def spoil_empty_class(root):
    (root / "empty").mkdir()


def spoil_nesting(root):
    (root / "dog" / "puppies").mkdir()


def spoil_loose(root):
    Image.new("RGB", (6, 6)).save(root / "loose.jpg")


def spoil_groups(root):
    np.save(root / "groups.npy", np.zeros(6))


@pytest.mark.parametrize(
    ("spoil", "named", "fix"),
    [
        (spoil_corrupt, "1.png", "repair or remove"),
        (spoil_text, "notes.txt", "repair or remove"),
        (spoil_sizes, "1.png", "set data.size to"),
        (spoil_modes, "1.png", "set data.channels to"),
        (spoil_frames, "1.gif", "3 frames"),
        (spoil_depth, "1.tiff", "8 bits"),
        (spoil_nesting, "puppies", "directly in their class"),
        (spoil_loose, "loose.jpg", "outside a class"),
        (spoil_groups, "groups.npy", "group privacy"),
    ],
)
def test_a_folder_that_cannot_be_used_names_the_file_and_the_fix(tmp_path, spoil, named, fix):
    root = write_folder(tmp_path / "in")
    spoil(root)
    with pytest.raises(DataError, match=fix) as caught:
        read_all(Data(source="imagefolder", path=str(root)), tmp_path)
    assert named in str(caught.value)


def test_a_class_whose_last_picture_was_taken_away_is_a_class_all_the_same(tmp_path):
    """Refused, or left out of the public class list, it would tell of that one picture."""
    root = write_folder(tmp_path / "in")
    before = read_all(Data(source="imagefolder", path=str(root)), tmp_path)[0]
    spoil_empty_class(root)
    after, images, labels = read_all(Data(source="imagefolder", path=str(root)), tmp_path)
    assert set(after.classes) == {*before.classes, "empty"}
    assert after.classes.index("empty") not in labels and len(images) == len(labels) > 0


def test_a_missing_empty_or_single_class_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path is missing"):
        read_source(Data(source="imagefolder"), tmp_path)
    with pytest.raises(DataError, match="not a folder"):
        read_source(Data(source="imagefolder", path=str(tmp_path / "nowhere")), tmp_path)
    (tmp_path / "in").mkdir()
    with pytest.raises(DataError, match="is empty"):
        read_source(Data(source="imagefolder", path=str(tmp_path / "in")), tmp_path)
    write_folder(tmp_path / "in", classes=("cat",))
    with pytest.raises(DataError, match="one class only"):
        read_source(Data(source="imagefolder", path=str(tmp_path / "in")), tmp_path)


def test_a_public_folder_or_archive_may_mix_sizes_and_hold_groups(tmp_path):
    root = write_folder(tmp_path / "in")
    spoil_sizes(root)
    spoil_modes(root)
    spoil_groups(root)
    _, images, labels = read_all_public(Public(source="imagefolder", path=str(root)), (1, 5, 7), tmp_path)
    assert images.shape == (6, 5, 7, 1) and labels.tolist() == [0, 0, 0, 1, 1, 1]
    path = write_npz(tmp_path, groups=np.zeros(4)).path
    assert len(read_all_public(Public(source="npz", path=path), (3, 4, 4), tmp_path)[1]) == 4
