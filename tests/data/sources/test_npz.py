"""Archives of numpy arrays: a user's own npz file, and MedMNIST's."""

import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from surveys import survey
from writers import NPZ, read_all, write_npz

from sfumato.data.images import write_header
from sfumato.data.sources import read_source
from sfumato.errors import DataError
from sfumato.settings.data import Data


def test_an_npz_gives_its_images_labels_and_classes(tmp_path):
    source, images, labels = read_all(write_npz(tmp_path), tmp_path)
    assert np.array_equal(np.stack(images)[..., 0], NPZ["images"])
    assert source.classes == ("a", "b") and labels == [0, 1, 0, 1]


def test_the_suffix_of_an_npz_may_be_in_any_case(tmp_path):
    write_npz(tmp_path)
    file = (tmp_path / "set.npz").rename(tmp_path / "SET.NPZ")
    assert survey(file, classes="all").images == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": None}, r"lacks the array\(s\) classes"),
        ({"images": None}, r"lacks the array\(s\) images"),
        ({"images": NPZ["images"] / 255}, "expected uint8"),
        ({"images": np.zeros((4, 3, 3, 2), np.uint8)}, "C 1 or 3"),
        ({"labels": np.array([0, 1, 2, 1])}, r"expected 0\.\.1"),
        ({"labels": np.array([0, -1, 0, 1])}, r"expected 0\.\.1"),
        ({"labels": np.zeros(4)}, "expected integers"),
        ({"labels": np.zeros(5, np.int64)}, "expected integers"),
        ({"classes": np.array(["a"]), "labels": np.zeros(4, np.int64)}, r"1 class\(es\)"),
        ({"classes": np.array(["a", "a"])}, "distinct strings"),
        ({"classes": np.array([0, 1])}, "distinct strings"),
        ({"classes": np.array(["a", ""])}, "not a valid class name"),
        ({"classes": np.array(["a", "\x1b[2J"])}, "not a valid class name"),
        ({"classes": np.array(["a", None], object)}, "Python objects in dtype.*plain arrays"),
        ({"groups": np.zeros(4)}, "privacy.unit: group"),
    ],
)
def test_an_npz_that_cannot_be_used_is_refused(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        read_source(write_npz(tmp_path, **changes), tmp_path)


@pytest.mark.parametrize("labels", [["a", "b"], [b"a", b"b"], [0.0, np.nan], [True, False]])
def test_labels_other_than_integers_are_refused_with_advice(tmp_path, labels):
    data = write_npz(tmp_path, labels=np.array(labels * 2), classes=None)
    with pytest.raises(DataError, match="labels are .*, expected integers: number the classes"):
        survey(Path(data.path))


def test_ids_of_each_part_are_checked_before_they_are_joined(tmp_path):
    arrays = {f"{part}_{name}": NPZ[name] for part in ("train", "test") for name in NPZ}
    arrays |= {"train_groups": np.arange(11, 15), "test_groups": np.array(["p", "p", "q", "s"])}
    np.savez(tmp_path / "set.npz", **arrays)
    data = Data(
        source="npz", path=str(tmp_path / "set.npz"), classes=("a", "b"), groups={"array": True}
    )
    assert read_source(data, tmp_path).groups == ["11", "12", "13", "14", "p", "p", "q", "s"]
    np.savez(tmp_path / "set.npz", **arrays | {"test_groups": np.arange(4)[:, None]})
    with pytest.raises(DataError, match="`test_groups` is an array .* with 2 dimension"):
        read_source(data, tmp_path)


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    for name, content in (
        ("empty.npz", b""),
        ("broken.npz", b"PK\x03\x04 broken"),
        ("text.npz", b"text"),
    ):
        (tmp_path / name).write_bytes(content)
    np.save(tmp_path / "set.npy", NPZ["images"])
    for name in ("empty.npz", "broken.npz", "text.npz", "set.npy", "nowhere.npz"):
        with pytest.raises(DataError, match=name):
            read_source(Data(source="npz", path=str(tmp_path / name)), tmp_path)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_is_the_same_however_it_was_saved(tmp_path, order, save):
    images = np.random.default_rng(0).integers(0, 256, (10, 4, 5, 3), dtype=np.uint8)
    labels = (np.arange(10) % 2).astype(">i4")
    save(
        tmp_path / "set.npz",
        images=np.asarray(images, order=order),
        labels=labels,
        classes=NPZ["classes"],
    )
    source, found, known = read_all(Data(source="npz", path=str(tmp_path / "set.npz")), tmp_path)
    assert (
        source.size == 10 and np.array_equal(np.stack(found), images) and known == labels.tolist()
    )


def test_an_archive_is_never_held_whole(tmp_path):
    count = 100_000  # images of 6.4 MB and labels of 0.8 MB
    data = write_npz(
        tmp_path, images=np.zeros((count, 8, 8), np.uint8), labels=np.zeros(count, np.int64)
    )
    next(iter(read_source(data, tmp_path).train))  # imports modules before the measurement
    tracemalloc.start()
    assert sum(1 for _ in read_source(data, tmp_path).train) == count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6


def test_an_archive_whose_bytes_were_changed_is_refused(tmp_path):
    data = write_npz(
        tmp_path, images=np.full((600, 3, 3), 7, np.uint8), labels=np.zeros(600, np.int64)
    )
    whole = Path(data.path).read_bytes()
    Path(data.path).write_bytes(whole.replace(bytes([7] * 9), bytes([8] * 9), 1))
    with pytest.raises(DataError, match="Bad CRC-32"):
        list(read_source(data, tmp_path).train)


# ---- archives whose headers claim too much


def test_an_array_larger_than_its_bytes_is_refused_early(tmp_path):
    data = write_npz(tmp_path, images=None)
    write_header(header := io.BytesIO(), np.dtype(np.uint8), (2**36, 28, 28))  # 54 TiB
    with zipfile.ZipFile(data.path, "a") as archive:
        archive.writestr("images.npy", header.getvalue())
    with pytest.raises(DataError, match="greater than file size"):
        read_source(data, tmp_path)


def test_an_encrypted_archive_is_refused(tmp_path):
    data = write_npz(tmp_path)
    content = bytearray(Path(data.path).read_bytes())
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = -1
        while (start := content.find(mark, start + 1)) >= 0:
            content[start + flags] |= 1
    Path(data.path).write_bytes(content)
    with pytest.raises(DataError, match="encrypted"):
        read_source(data, tmp_path)


@pytest.mark.parametrize("parts", [("",), ("train_", "val_", "test_")])
def test_ids_in_any_array_of_an_npz_are_noticed(tmp_path, parts):
    arrays = {"classes": np.array(["a", "b"])}
    for part in parts:
        arrays |= {
            f"{part}images": np.zeros((40, 8, 8), np.uint8),
            f"{part}labels": np.arange(40) % 2,
            f"{part}age": np.arange(40) // 2 + 30,
            f"{part}mrn_hash": np.array([f"{part}{i // 4 + 4096:x}" for i in range(40)]),
        }
    np.savez(tmp_path / "set.npz", **arrays)
    assert survey(tmp_path / "set.npz", classes="all").repeats.groups == "mrn_hash"
