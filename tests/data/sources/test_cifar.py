"""CIFAR-10 and CIFAR-100: files in the form that torchvision reads become RGB images."""

import hashlib
import pickle

import numpy as np
import pytest
from torchvision import datasets
from writers import read_all, read_all_public

from sfumato.data.sources import read_public, read_source
from sfumato.errors import DataError
from sfumato.settings.data import Data, Public

NAMES = ["first", "second", "third"]
FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


@pytest.fixture(params=FOLDERS)
def written(request, tmp_path, monkeypatch):
    """Write a set of two images per file that torchvision accepts as complete. Return its name,
    images and labels.
    """
    known = getattr(datasets, request.param.upper())
    folder = tmp_path / FOLDERS[request.param]
    folder.mkdir()

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    files = [name for name, _ in (*known.train_list, *known.test_list)]
    images = np.random.default_rng(0).integers(0, 256, (len(files), 2, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(2 * len(files)).reshape(-1, 2) % 3
    key = "labels" if request.param == "cifar10" else "fine_labels"
    rows = images.transpose(0, 1, 4, 2, 3).reshape(len(files), 2, -1)
    sums = [
        [name, write(name, {"data": own, key: row})]
        for name, own, row in zip(files, rows, labels.tolist(), strict=True)
    ]
    monkeypatch.setattr(known, "train_list", sums[:-1])
    monkeypatch.setattr(known, "test_list", sums[-1:])
    monkeypatch.setattr(
        known,
        "meta",
        known.meta | {"md5": write(known.meta["filename"], {known.meta["key"]: NAMES})},
    )
    return request.param, images.reshape(-1, 32, 32, 3), labels.flatten().tolist()


def test_cifar_comes_out_as_rows_of_rgb(written, tmp_path):
    name, images, labels = written
    source, read, found = read_all_public(Public(source=name), (3, 32, 32), tmp_path)
    assert (
        np.array_equal(read, images[:-2])
        and found.tolist() == labels[:-2]
        and source.classes == tuple(NAMES)
    )
    with pytest.raises(DataError, match="not contain all files of CIFAR"):
        read_public(Public(source=name, path=str(tmp_path / "elsewhere")), (3, 32, 32), tmp_path, 0)
    if name == "cifar10":
        source, read, found = read_all(Data(source=name, path=str(tmp_path)), tmp_path / "raw")
        assert np.array_equal(read, images[:-2]) and found == labels[:-2]
        assert [label for _, label in source.test] == labels[-2:]
        (tmp_path / FOLDERS[name] / "test_batch").write_bytes(b"short")
        with pytest.raises(DataError, match="not contain all files of CIFAR10"):
            read_source(Data(source=name, path=str(tmp_path)), tmp_path)
