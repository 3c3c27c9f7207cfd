"""A folder with one folder of pictures per class: what is read, and what a refusal names."""

import os

import numpy as np
import pytest
from PIL import Image
from writers import read_all, read_all_public, write_folder, write_npz

from sfumato.data.decoding import decode
from sfumato.data.sources import read_source
from sfumato.errors import ConfigError, DataError
from sfumato.settings.data import Data, Public


def test_a_folder_gives_classes_without_files_of_systems(tmp_path):
    root = write_folder(tmp_path / "in", classes=("dog", "cat"))
    for name in (".hidden", "__MACOSX"):
        (root / name).mkdir()
        (root / name / "._1.png").write_bytes(b"x")
    for name in ("README.txt", "cat/Thumbs.db", "cat/desktop.ini", "cat/.DS_Store"):
        (root / name).write_bytes(b"x")
    source, images, labels = read_all(Data(source="imagefolder", path=str(root)), tmp_path)
    assert source.classes == ("cat", "dog") and labels == [0, 0, 0, 1, 1, 1] and source.test is None
    assert np.array_equal(images[4], np.asarray(Image.open(root / "dog" / "1.png")))


@pytest.mark.parametrize(
    "name", ["lost+found", "LOST+FOUND", "$RECYCLE.BIN", "System Volume Information", "@eaDir"]
)
def test_a_folder_of_a_system_is_not_opened(name, tmp_path):
    """The system may forbid everyone to read its own folders, such as lost+found. In this test, a
    link out of the picture folder has the name of such a folder. If the link was opened, reading
    would end with an error.
    """
    root = write_folder(tmp_path / "in")
    (root / name).symlink_to(tmp_path)
    (root / "cat" / name).symlink_to(tmp_path)
    source, images, _ = read_all(Data(source="imagefolder", path=str(root)), tmp_path)
    assert source.classes == ("cat", "dog") and len(images) == 6


def test_a_folder_with_two_names_is_refused(tmp_path):
    """If a link gave a folder a second name, each of its pictures would count twice, perhaps under
    two persons' ids.
    """
    write_folder(tmp_path / "in/dog")
    (tmp_path / "in/cat").mkdir()
    (tmp_path / "in/cat/P1").symlink_to("../dog/dog")
    settings = Data(source="imagefolder", path=str(tmp_path / "in"), groups={"folder": True})
    with pytest.raises(DataError, match="are the same file or folder, because of a link"):
        read_source(settings, tmp_path)
    (tmp_path / "in/cat/P1").unlink()
    assert read_source(settings, tmp_path).size == 6
    (tmp_path / "in/ape").symlink_to("dog")
    with pytest.raises(DataError, match="would count twice: remove the link"):
        read_source(settings, tmp_path)


def test_transparency_is_black(tmp_path):
    pixels = np.array([[[255, 0], [255, 255]], [[100, 255], [0, 255]]], np.uint8)
    Image.fromarray(pixels, "LA").save(tmp_path / "0.png")
    assert decode(tmp_path / "0.png")[..., 0].tolist() == [[0, 255], [100, 0]]


def save_frames(file):
    frames = [Image.new("L", (6, 6), value) for value in (0, 90, 180)]
    frames[0].save(file, save_all=True, append_images=frames[1:])


def resize_three(folder):
    for i in range(3):
        Image.new("RGB", (7, 6)).save(folder / f"{i}.png")


def link_out(file):
    outside = file.parents[2] / "elsewhere.png"
    Image.new("RGB", (6, 6)).save(outside)
    file.symlink_to(outside)


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 6\n%%EndComments\n"
# Fault -> function that makes it in a folder of cats and dogs; file name and fix in the error
SPOILED = {
    "size": (
        lambda root: Image.new("RGB", (7, 6)).save(root / "dog/1.png"),
        "1.png",
        "set data.size to",
    ),
    "sizes": (
        lambda root: resize_three(root / "dog"),
        "0.png is 6×7 colour",
        r"\(2 more picture\(s\) differ from .*\): set data.size to",
    ),
    "channels": (
        lambda root: Image.new("L", (6, 6)).save(root / "dog/1.png"),
        "1.png",
        "set data.channels to",
    ),
    "groups": (
        lambda root: np.save(root / "groups.npy", np.zeros(6)),
        "groups.npy",
        "privacy.unit: group",
    ),
    "loose": (
        lambda root: Image.new("RGB", (6, 6)).save(root / "loose.jpg"),
        "loose.jpg",
        "not in a class folder",
    ),
    "nesting": (lambda root: (root / "dog/puppies").mkdir(), "puppies", "into the class folder"),
    "text": (
        lambda root: (root / "dog/notes.txt").write_text("no picture"),
        "notes.txt",
        "repair or remove",
    ),
    "cut": (lambda root: os.truncate(root / "dog/1.png", 60), "1.png", "repair or remove"),
    "postscript": (
        lambda root: (root / "cat/1.png").write_bytes(POSTSCRIPT),
        "1.png",
        "is PostScript",
    ),
    "frames": (lambda root: save_frames(root / "dog/1.gif"), "1.gif", "several frames"),
    "depth": (
        lambda root: Image.fromarray(np.zeros((6, 6), "f4")).save(root / "dog/1.tiff"),
        "1.tiff",
        "range: ",
    ),
    "pipe": (lambda root: os.mkfifo(root / "cat/pipe.png"), "pipe.png", "is not a file"),
    "link": (lambda root: link_out(root / "cat/link.png"), "elsewhere.png", "outside of"),
    "linked class": (lambda root: (root / "bird").symlink_to(root.parent), "bird", "outside of"),
    "dead link": (
        lambda root: (root / "cat/link.png").symlink_to(root / "gone.png"),
        "link.png",
        "is not a file",
    ),
    "class name": (lambda root: (root / "caf\udce9").mkdir(), "caf", "not a valid class name"),
}


@pytest.mark.parametrize(("spoil", "named", "fix"), SPOILED.values(), ids=SPOILED)
def test_a_folder_that_cannot_be_used_names_the_file_and_the_fix(tmp_path, spoil, named, fix):
    root = write_folder(tmp_path / "in")
    spoil(root)
    with pytest.raises(DataError, match=fix) as caught:
        read_all(Data(source="imagefolder", path=str(root)), tmp_path)
    assert named in str(caught.value)


def test_a_link_within_the_folder_is_a_picture(tmp_path):
    root = write_folder(tmp_path / "in")
    (root / "cat" / "0.png").rename(root / ".0.png")
    (root / "cat" / "again.png").symlink_to(root / ".0.png")
    (tmp_path / "name").symlink_to(root)
    assert len(read_all(Data(source="imagefolder", path=str(tmp_path / "name")), tmp_path)[1]) == 6
    (root / "dog" / "again.png").symlink_to("../cat/1.png")
    with pytest.raises(DataError, match=r"again\.png and .*1\.png are the same file"):
        read_source(Data(source="imagefolder", path=str(root)), tmp_path)


def test_a_class_whose_last_picture_is_gone_remains_a_class(tmp_path):
    """Refusing the class, or leaving it out of the public class list, would reveal that its last
    picture is gone.
    """
    root = write_folder(tmp_path / "in")
    before = read_all(Data(source="imagefolder", path=str(root)), tmp_path)[0]
    (root / "empty").mkdir()
    after, images, labels = read_all(Data(source="imagefolder", path=str(root)), tmp_path)
    assert set(after.classes) == {*before.classes, "empty"}
    assert after.classes.index("empty") not in labels and len(images) == len(labels) > 0


def test_a_missing_empty_or_single_class_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path is missing"):
        read_source(Data(source="imagefolder"), tmp_path)
    root = tmp_path / "in"
    for change, message in (
        (lambda: None, "does not exist"),
        (root.mkdir, "contains no pictures: expected one folder of pictures per class"),
        (
            lambda: (root / "0.png").write_bytes(b""),
            "contains pictures, but no class folder: move each",
        ),
        (
            lambda: (root / "0.png").rename(write_folder(root, classes=("cat",)) / "cat/0.png"),
            r"1 class\(es\), expected two or more",
        ),
    ):
        change()
        with pytest.raises(DataError, match=message):
            read_source(Data(source="imagefolder", path=str(root)), tmp_path)


def test_a_public_folder_may_mix_sizes_and_contain_groups(tmp_path):
    root = write_folder(tmp_path / "in")
    for name in ("size", "channels", "groups"):
        SPOILED[name][0](root)
    _, images, labels = read_all_public(
        Public(source="imagefolder", path=str(root)), (1, 5, 7), tmp_path
    )
    assert images.shape == (6, 5, 7, 1) and labels.tolist() == [0, 0, 0, 1, 1, 1]
    path = write_npz(tmp_path, groups=np.zeros(4)).path
    assert len(read_all_public(Public(source="npz", path=path), (3, 4, 4), tmp_path)[1]) == 4


def write_splits(root):
    for name, count in (("train", 3), ("test", 2)):
        write_folder(root / name, per_class=count)
    return root


def test_the_folder_test_is_the_hold_out(tmp_path):
    root = write_splits(tmp_path / "in")
    data = Data(source="imagefolder", path=str(root))
    source = read_source(data, tmp_path)
    assert source.classes == ("cat", "dog") and source.size == 10
    train = list(source.train)
    test = list(source.test)
    assert [label for _, label in train] == [0, 0, 0, 1, 1, 1] and [label for _, label in test] == [
        0,
        0,
        1,
        1,
    ]
    assert np.array_equal(test[3][0], np.asarray(Image.open(root / "test" / "dog" / "1.png")))
    _, images, _ = read_all_public(
        Public(source="imagefolder", path=str(root)), (3, 6, 6), tmp_path
    )
    assert len(images) == 6  # public images need no hold-out
    for name in source.classes:
        resize_three(root / "test" / name)
    other = read_source(data, tmp_path)
    assert len(list(other.train)) == 6
    with pytest.raises(DataError, match=r"set data\.size to"):
        list(other.test)


def test_every_bad_file_of_either_split_is_named_in_one_run(tmp_path):
    root = write_splits(tmp_path / "in")
    pictures = [
        f"{folder}/{i}.png" for folder in ("train/cat", "train/dog", "test/cat") for i in range(6)
    ]
    for name in pictures:
        (root / name).write_bytes(b"no picture")
    for name in ("loose", "nesting"):
        SPOILED[name][0](root / "train")
    (root / "test" / "bird").mkdir()
    with pytest.raises(DataError) as caught:
        read_all(Data(source="imagefolder", path=str(root)), tmp_path)
    first, *lines = str(caught.value).splitlines()
    assert first == "21 files cannot be used:" and len(lines) == 21
    for name in (*pictures, "train/loose.jpg", "train/dog/puppies", "test/bird"):
        assert any(f"/{name} " in line for line in lines), name


@pytest.mark.parametrize(
    "names", [("train", "test"), ("Training", "VAL", "Testing"), ("TRAIN", "valid", "dev", "test")]
)
def test_parts_match_in_any_case_and_validation_joins_training(tmp_path, names):
    for i, name in enumerate(names):
        write_folder(
            tmp_path / "in" / name,
            classes=("cat", "dog", *(["bird"] if i == 1 < len(names) - 1 else [])),
        )
    source = read_source(Data(source="imagefolder", path=str(tmp_path / "in")), tmp_path)
    assert {*source.classes} == ({"cat", "dog"} if len(names) == 2 else {"bird", "cat", "dog"})
    assert len(list(source.test)) == 6 and source.size == len(
        list((tmp_path / "in").rglob("*.png"))
    )


def test_pictures_directly_in_train_and_test_are_no_two_classes(tmp_path):
    root = write_folder(tmp_path / "in", classes=("test", "train"))
    with pytest.raises(DataError, match="no class folder"):
        read_source(Data(source="imagefolder", path=str(root)), tmp_path)
    write_folder(root, classes=("bus", "car"))
    source = read_source(Data(source="imagefolder", path=str(root)), tmp_path)
    # Beside other class folders, `test` and `train` count as classes too
    assert source.classes == ("bus", "car", "test", "train") and source.test is None
