import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.data.images import (
    ImageSet,
    ImageWriter,
    load_array,
    load_images,
    save_images,
    write_header,
)
from sfumato.errors import DataError
from sfumato.storage.png import save_png, to_grid


def test_a_set_survives_the_disk_and_is_memory_mapped(digits, tmp_path):
    save_images(tmp_path / "whole", digits)
    with ImageWriter(tmp_path / "one-by-one", digits.shape, digits.classes) as writer:
        for image, label in zip(digits.images, digits.labels, strict=True):
            writer.append(image, int(label))
    for folder in tmp_path.iterdir():
        assert sorted(path.name for path in folder.iterdir()) == ["images.npy", "labels.npy"]
        loaded = load_images(folder, digits.classes)
        assert isinstance(loaded.images, np.memmap) and not loaded.images.flags.writeable
        assert np.array_equal(loaded.images, digits.images) and np.array_equal(
            loaded.labels, digits.labels
        )
        assert loaded.shape == (1, 8, 8) and len(loaded) == 1797
    with ImageWriter(tmp_path / "empty", (3, 4, 5), ("a", "b")):
        pass
    loaded = load_images(tmp_path / "empty", ("a", "b"))
    assert len(loaded) == 0 and loaded.shape == (3, 4, 5)


def test_a_batch_is_channels_first_floats_in_the_unit_range():
    images = np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3)
    images[0, 0, 0, 0] = 255
    image_set = ImageSet(images, np.array([1, 0]), ("a", "b"))
    batch, labels = image_set.batch(np.array([1, 0, 1]))
    assert batch.shape == (3, 3, 3, 4) and batch.dtype == torch.float32 and batch.is_contiguous()
    assert labels.tolist() == [0, 1, 0] and labels.dtype == torch.int64
    assert batch.max() == 1 and batch[0, 2, 1, 3] == images[1, 1, 3, 2] / np.float32(255)


def test_a_batch_is_a_copy_and_may_be_empty(digits):
    batch, labels = digits.batch(np.array([]))
    assert batch.shape == (0, 1, 8, 8) and labels.shape == (0,)
    before = digits.images[5].copy()
    batch, labels = digits.batch(np.array([5]))
    batch.zero_(), labels.zero_()
    assert np.array_equal(digits.images[5], before) and digits.labels[5] == 5


GOOD = np.zeros((3, 4, 4, 1), np.uint8)
BAD = {
    "float images": (GOOD.astype(np.float32), np.zeros(3, np.int64), "uint8"),
    "no channel axis": (GOOD[..., 0], np.zeros(3, np.int64), "uint8"),
    "two channels": (GOOD.repeat(2, axis=3), np.zeros(3, np.int64), "C 1 or 3"),
    "float labels": (GOOD, np.full(3, np.nan), "int64"),
    "label too large": (GOOD, np.array([0, 1, 2]), "0..1 for 2 classes"),
    "label below zero": (GOOD, np.array([0, 1, -1]), "0..1 for 2 classes"),
    "lengths differ": (GOOD, np.zeros(4, np.int64), "3 images, but labels.npy contains 4 labels"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_set_is_refused_on_loading_and_on_saving(case, tmp_path):
    images, labels, message = BAD[case]
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "labels.npy", labels)
    with pytest.raises(DataError, match=message):
        load_images(tmp_path, ("a", "b"))
    with pytest.raises(DataError, match=message):
        save_images(tmp_path / "new", ImageSet(images, labels, ("a", "b")))
    assert not (tmp_path / "new").exists()


def test_missing_truncated_and_pickled_files_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"images\.npy is missing"):
        load_images(tmp_path, ("a", "b"))
    np.save(tmp_path / "images.npy", GOOD)
    np.save(tmp_path / "labels.npy", np.array([{}, {}, {}]), allow_pickle=True)
    with pytest.raises(DataError, match=r"labels\.npy is not a complete"):
        load_images(tmp_path, ("a", "b"))
    np.save(tmp_path / "labels.npy", np.zeros(3, np.int64))
    content = (tmp_path / "images.npy").read_bytes()
    (tmp_path / "images.npy").write_bytes(content[:-5])
    with pytest.raises(DataError, match=r"images\.npy is not a complete"):
        load_images(tmp_path, ("a", "b"))
    np.save(tmp_path / "groups.npy", np.zeros(3))
    with pytest.raises(DataError, match="privacy.unit: group"):
        load_images(tmp_path, ("a", "b"))


def test_a_grid_magnifies_images_and_keeps_their_places(tmp_path):
    images = torch.tensor([0.0, 1.0, float("nan"), 7.0]).view(4, 1, 1, 1).expand(4, 3, 8, 8)
    grid = to_grid(images, columns=3)
    assert grid.dtype == np.uint8 and grid.shape == (2 + 2 * 50, 2 + 3 * 50, 3)
    centres = [grid[26 + 50 * (i // 3), 26 + 50 * (i % 3)].tolist() for i in range(4)]
    assert centres == [[0] * 3, [255] * 3, [0] * 3, [255] * 3]
    assert to_grid(images[:, :1].repeat(1, 1, 16, 16), columns=4).shape[0] == 128 + 4


def test_a_png_holds_the_pixels_it_was_given(tmp_path):
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    save_png(tmp_path / "new" / "grey.png", grey)
    save_png(tmp_path / "colour.png", grey.repeat(3, axis=2))
    assert np.array_equal(np.asarray(Image.open(tmp_path / "new" / "grey.png")), grey[:, :, 0])
    assert np.array_equal(np.asarray(Image.open(tmp_path / "colour.png")), grey.repeat(3, axis=2))


@pytest.mark.parametrize("shape", [(-1, 8), (-8, -8), (0, -1), (2**40,)])
def test_an_array_of_a_shape_that_no_array_has_is_refused(tmp_path, shape):
    with (tmp_path / "x.npy").open("wb") as file:
        write_header(file, np.dtype(np.uint8), shape)
        file.write(bytes(64))
    with pytest.raises(DataError, match="not a complete"):
        load_array(tmp_path / "x.npy")
