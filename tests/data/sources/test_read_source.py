"""Test every source: shape, size and channels, places of files, and how public images are
fitted.
"""

import sys
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from writers import read_all, read_all_public, write_folder, write_public

from sfumato.data.rendered import DRAWN, drawn_set
from sfumato.data.sources import idx, read_public, read_source
from sfumato.errors import ConfigError, DataError
from sfumato.settings.data import Data, Public
from sfumato.settings.fields import both_sides
from sfumato.settings.sources import OF_THE_OWNER, SOURCES, sources_of


def test_digits_span_the_whole_range(digits, tmp_path):
    source, images, labels = read_all(Data(), tmp_path)
    assert source.test is None and source.classes == digits.classes and source.size == 1797
    assert np.array_equal(np.stack(images), digits.images) and labels == digits.labels.tolist()
    assert min(image.min() for image in images) == 0 and max(image.max() for image in images) == 255


def test_size_and_channels_convert_every_picture(tmp_path):
    root = write_folder(tmp_path / "in", shape=(6, 6, 3))
    Image.new("L", (9, 4), 77).save(root / "cat" / "other.jpg")
    Image.new("P", (3, 3)).save(root / "dog" / "palette.gif")
    for channels in (1, 3):
        for size in (5, (4, 6)):
            asked = Data(source="imagefolder", path=str(root), size=size, channels=channels)
            _, images, _ = read_all(asked, tmp_path)
            assert {(image.shape, image.dtype.name) for image in images} == {
                ((*both_sides(size), channels), "uint8")
            }
    assert np.abs(images[3].astype(int) - 77).max() <= 2


def test_output_is_withheld_before_a_sensitive_source_is_opened(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "in")
    withhold = Mock(side_effect=KeyError)
    monkeypatch.setattr("sfumato.errors.watchers", [withhold])
    monkeypatch.setattr(
        "sfumato.data.sources.imagefolder.read_imagefolder", Mock(side_effect=DataError)
    )
    with pytest.raises(KeyError):
        read_source(Data(source="imagefolder", path=str(root)), tmp_path)
    withhold.assert_called_once_with()


class Unreachable:
    """Stand-in for `torchvision.datasets` without a network."""

    def __getattr__(self, name):
        return Mock(side_effect=OSError("no route to host"))


@pytest.mark.parametrize("name", sorted({*SOURCES} - {"digits", *DRAWN, *OF_THE_OWNER}))
def test_a_failed_download_names_the_folder_for_the_files(tmp_path, monkeypatch, name):
    monkeypatch.setattr(idx, "DEBIAN_FASHION_MNIST", tmp_path / "package")
    monkeypatch.setitem(sys.modules, "torchvision", Mock(datasets=Unreachable()))
    with pytest.raises(DataError, match="no route to host") as caught:
        if name in sources_of("data"):
            read_source(Data(source=name), tmp_path)
        else:
            read_public(Public(source=name), (1, 8, 8), tmp_path, 0)
    assert f" into {tmp_path}" in str(caught.value)


# ---- public images


def test_real_public_images_take_the_shape_of_the_sensitive_ones(tmp_path):
    path = str(tmp_path / "public.npz")
    images = write_public(path, 3)
    for shape in ((1, 28, 28), (3, 16, 20), (1, 32, 32)):
        _, read, _ = read_all_public(Public(source="npz", path=path), shape, tmp_path)
        assert read.shape == (3, shape[1], shape[2], shape[0])
    weights = np.array([0.299, 0.587, 0.114])
    # The last shape is grey, and keeps the full size of 32×32 pixels
    assert np.abs(read[..., 0] - images @ weights).max() <= 1.5


def test_missing_files_are_named_and_never_downloaded(tmp_path):
    for name in {*sources_of("data")} - {"digits"}:
        with pytest.raises(DataError, match="nowhere"):
            read_source(
                Data(source=name, path=str(tmp_path / "nowhere"), classes=("a", "b")), tmp_path
            )
    for name in {*sources_of("public")} - {*DRAWN}:
        with pytest.raises(DataError, match="nowhere"):
            read_public(Public(source=name, path=str(tmp_path / "nowhere")), (1, 8, 8), tmp_path, 0)
    for public, error, message in (
        (Public(source="imagefolder"), ConfigError, r"public\.path is missing"),
        (Public(source="npz"), ConfigError, r"public\.path is missing"),
        (Public(source="photos", path="/photos"), ConfigError, "reads no files: leave public"),
    ):
        with pytest.raises(error, match=message):
            read_public(public, (1, 8, 8), tmp_path, 0)


def test_a_drawn_source_yields_the_images_of_its_set(tmp_path):
    opened, images, labels = read_all_public(
        Public(source="procedural", per_class=2), (3, 12, 9), tmp_path, seed=1
    )
    drawn = drawn_set("procedural", (3, 12, 9), 2, seed=1)
    assert np.array_equal(images, drawn.images) and np.array_equal(labels, drawn.labels)
    assert opened.classes == drawn.classes
