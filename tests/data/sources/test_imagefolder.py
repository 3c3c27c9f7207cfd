"""A folder with one folder of pictures per class: what is read, and what is refused by name."""

import os

import numpy as np
import pytest
from PIL import Image
from writers import read_all, read_all_public, write_folder, write_npz

from sfumato.data.sources import read_source
from sfumato.errors import ConfigError, DataError
from sfumato.settings.data import Data, Public


def test_a_folder_gives_its_classes_and_pictures_by_name(tmp_path):
    root = write_folder(tmp_path / "in", classes=("dog", "cat"))
    (root / ".hidden").mkdir()
    (root / "cat" / ".DS_Store").write_bytes(b"x")
    (root / "README.txt").write_text("about")
    source, images, labels = read_all(Data(source="imagefolder", path=str(root)), tmp_path)
    assert source.classes == ("cat", "dog") and labels == [0, 0, 0, 1, 1, 1] and source.test is None
    assert np.array_equal(images[4], np.asarray(Image.open(root / "dog" / "1.png")))


def test_sixteen_bit_grey_is_shown_by_its_range_and_transparency_is_black(tmp_path):
    root = write_folder(tmp_path / "in", shape=(2, 2, 1))
    Image.fromarray(np.array([[0, 255], [256, 65535]], np.uint16)).save(root / "cat" / "0.png")
    Image.fromarray(np.array([[[255, 0], [255, 255]], [[100, 255], [0, 255]]], np.uint8), "LA").save(
        root / "cat" / "1.png"
    )
    _, images, _ = read_all(Data(source="imagefolder", path=str(root), range=(0, 65535)), tmp_path)
    assert images[0][..., 0].tolist() == [[0, 1], [1, 255]]
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


def spoil_pipe(root):
    os.mkfifo(root / "cat" / "pipe.png")


def spoil_link(root):
    Image.new("RGB", (6, 6)).save(root.parent / "elsewhere.png")
    (root / "cat" / "link.png").symlink_to(root.parent / "elsewhere.png")


def spoil_linked_class(root):
    (root.parent / "others").mkdir()
    (root / "bird").symlink_to(root.parent / "others")


def spoil_dead_link(root):
    (root / "cat" / "link.png").symlink_to(root / "cat" / "gone.png")


def spoil_postscript(root):
    (root / "cat" / "1.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 6\n%%EndComments\n")


def spoil_class_name(root):
    (root / "caf\udce9").mkdir()


@pytest.mark.parametrize(
    ("spoil", "named", "fix"),
    [
        (spoil_corrupt, "1.png", "repair or remove"),
        (spoil_text, "notes.txt", "repair or remove"),
        (spoil_sizes, "1.png", "set data.size to"),
        (spoil_modes, "1.png", "set data.channels to"),
        (spoil_frames, "1.gif", "3 frames"),
        (spoil_depth, "1.tiff", "range: "),
        (spoil_nesting, "puppies", "directly in their class"),
        (spoil_loose, "loose.jpg", "outside a class"),
        (spoil_groups, "groups.npy", "privacy.unit: group"),
        (spoil_pipe, "pipe.png", "is not a file"),
        (spoil_link, "elsewhere.png", "outside of"),
        (spoil_linked_class, "bird", "outside of"),
        (spoil_dead_link, "link.png", "is not a file"),
        (spoil_postscript, "1.png", "repair or remove"),
        (spoil_class_name, "caf", "not a valid class name"),
    ],
)
def test_a_folder_that_cannot_be_used_names_the_file_and_the_fix(tmp_path, spoil, named, fix):
    root = write_folder(tmp_path / "in")
    spoil(root)
    with pytest.raises(DataError, match=fix) as caught:
        read_all(Data(source="imagefolder", path=str(root)), tmp_path)
    assert named in str(caught.value)


def test_a_link_within_the_folder_is_a_picture(tmp_path):
    root = write_folder(tmp_path / "in")
    before = len(read_all(Data(source="imagefolder", path=str(root)), tmp_path)[1])
    first = next(path for path in sorted((root / "cat").iterdir()))
    (root / "cat" / "again.png").symlink_to(first)
    (tmp_path / "name").symlink_to(root)
    assert len(read_all(Data(source="imagefolder", path=str(tmp_path / "name")), tmp_path)[1]) == before + 1


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
    with pytest.raises(DataError, match=r"holds no pictures: expected one folder of pictures per class"):
        read_source(Data(source="imagefolder", path=str(tmp_path / "in")), tmp_path)
    (tmp_path / "in/0.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"holds pictures, but no folder of a class: move each into a folder"):
        read_source(Data(source="imagefolder", path=str(tmp_path / "in")), tmp_path)
    (tmp_path / "in/0.png").unlink()
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


def test_every_bad_file_is_named_in_one_run(tmp_path):
    root = write_folder(tmp_path / "in", per_class=30)
    spoil_loose(root)
    spoil_nesting(root)
    bad = ["loose.jpg", "puppies"]
    for i in range(0, 18):
        name = f"{i}.png"
        (root / ("cat" if i % 2 else "dog") / name).write_bytes(b"no picture")
        bad.append(name)
    with pytest.raises(DataError) as caught:
        read_all(Data(source="imagefolder", path=str(root)), tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == "20 files cannot be used:" and len(lines) == 21
    assert all(any(f"/{name} " in line for line in lines) for name in bad)


def test_many_pictures_of_other_sizes_are_one_problem(tmp_path):
    root = write_folder(tmp_path / "in", per_class=5)
    for i in range(4):
        Image.new("RGB", (7, 6)).save(root / "dog" / f"{i}.png")
    with pytest.raises(DataError, match=r"0\.png is 6×7 colour .* \(3 more differ\): set data\.size to"):
        read_all(Data(source="imagefolder", path=str(root)), tmp_path)


def test_what_systems_leave_behind_is_no_picture_and_no_class(tmp_path):
    root = write_folder(tmp_path / "in")
    (root / "__MACOSX").mkdir()
    (root / "__MACOSX" / "._1.png").write_bytes(b"x")
    for name in ("Thumbs.db", "desktop.ini", ".DS_Store"):
        (root / "cat" / name).write_bytes(b"x")
    source, images, _ = read_all(Data(source="imagefolder", path=str(root)), tmp_path)
    assert source.classes == ("cat", "dog") and len(images) == 6


def write_splits(root, **classes):
    for name, count in (("train", 3), ("test", 2)):
        write_folder(root / name, per_class=count, **classes)
    return root


def test_the_folder_test_is_the_hold_out(tmp_path):
    root = write_splits(tmp_path / "in")
    source = read_source(Data(source="imagefolder", path=str(root)), tmp_path)
    assert source.classes == ("cat", "dog") and source.size == 10
    train, test = list(source.train), list(source.test)
    assert [label for _, label in train] == [0, 0, 0, 1, 1, 1] and [label for _, label in test] == [0, 0, 1, 1]
    assert np.array_equal(test[3][0], np.asarray(Image.open(root / "test" / "dog" / "1.png")))
    _, images, _ = read_all_public(Public(source="imagefolder", path=str(root)), (3, 6, 6), tmp_path)
    assert len(images) == 6  # public images need no hold-out


def test_a_bad_file_in_either_split_is_named_with_those_of_the_other(tmp_path):
    root = write_splits(tmp_path / "in")
    (root / "train" / "dog" / "0.png").write_bytes(b"x")
    (root / "test" / "cat" / "1.png").write_bytes(b"x")
    (root / "test" / "bird").mkdir()
    with pytest.raises(DataError) as caught:
        read_all(Data(source="imagefolder", path=str(root)), tmp_path)
    assert all(name in str(caught.value) for name in ("train/dog/0.png", "test/cat/1.png", "test/bird"))


def test_a_hold_out_of_another_size_is_refused(tmp_path):
    root = write_splits(tmp_path / "in")
    for file in (root / "test").rglob("*.png"):
        Image.new("RGB", (7, 6)).save(file)
    source = read_source(Data(source="imagefolder", path=str(root)), tmp_path)
    assert len(list(source.train)) == 6
    with pytest.raises(DataError, match=r"set data\.size to"):
        list(source.test)


def test_classes_named_train_and_test_stay_classes(tmp_path):
    root = write_folder(tmp_path / "in", classes=("test", "train"))
    assert read_all(Data(source="imagefolder", path=str(root)), tmp_path)[0].classes == ("test", "train")
