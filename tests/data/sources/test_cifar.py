"""CIFAR-10 and CIFAR-100: rows of the binary version become RGB images."""

import numpy as np
import pytest
from writers import read_all, read_all_public

from sfumato.data.sources import read_public, read_source
from sfumato.data.sources.cifar import CIFARS
from sfumato.errors import DataError
from sfumato.settings.data import Data, Public


def test_cifar10_binary_files_come_out_as_rows_of_rgb(tmp_path):
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    images = rng.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    rows = np.concatenate(
        [np.arange(12, dtype=np.uint8)[:, None] % 10, images.transpose(0, 3, 1, 2).reshape(12, -1)], axis=1
    )
    for i, name in enumerate((*CIFARS["cifar10"].train, "test_batch.bin")):
        rows[2 * i : 2 * i + 2].tofile(folder / name)
    source, train, labels = read_all(Data(source="cifar10"), tmp_path)
    assert np.array_equal(np.stack(train), images[:10]) and labels == list(range(10))
    assert [label for _, label in source.test] == [0, 1]
    (folder / "test_batch.bin").write_bytes(b"short")
    with pytest.raises(DataError, match=r"test_batch\.bin"):
        read_source(Data(source="cifar10"), tmp_path)


@pytest.mark.parametrize(("known", "name"), [(CIFARS[name], name) for name in CIFARS])
def test_public_cifar_takes_the_finest_label_of_the_training_rows(tmp_path, known, name):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(10) * len(known.classes) // 10
    coarse = np.zeros((10, known.label_bytes - 1), np.uint8)
    rows = np.concatenate(
        [coarse, labels[:, None].astype(np.uint8), images.transpose(0, 3, 1, 2).reshape(10, -1)], axis=1
    )
    (tmp_path / known.folder).mkdir()
    for file, part in zip(known.train, np.array_split(rows, len(known.train)), strict=True):
        part.tofile(tmp_path / known.folder / file)
    source, read, found = read_all_public(Public(source=name), (3, 32, 32), tmp_path)
    assert np.array_equal(read, images) and found.tolist() == labels.tolist() and source.classes == known.classes
    with pytest.raises(DataError, match=r"public\.path"):
        read_public(Public(source=name, path=str(tmp_path)), (3, 32, 32), tmp_path, 0)
    (tmp_path / known.folder / known.train[0]).write_bytes(b"short")
    with pytest.raises(DataError, match="truncated"):
        read_public(Public(source=name), (3, 32, 32), tmp_path, 0)
