"""MNIST, Fashion-MNIST, EMNIST and KMNIST: idx files, whole and damaged."""

import gzip
import struct
import tracemalloc

import numpy as np
import pytest
from writers import read_all, read_all_public, write_idx, write_mnist

from sfumato.data.sources import idx, read_source
from sfumato.data.sources.idx import read_idx
from sfumato.errors import DataError
from sfumato.settings.data import Data, Public


@pytest.mark.parametrize("suffix", [".gz", ""])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw"])
def test_mnist_files_are_found_and_keep_their_official_split(tmp_path, suffix, folder):
    arrays = write_mnist(tmp_path / folder, suffix=suffix)
    source, images, labels = read_all(Data(source="mnist"), tmp_path)
    assert np.array_equal(np.stack(images)[..., 0], arrays["train"][0]) and labels == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert np.array_equal(np.stack([image for image, _ in source.test])[..., 0], arrays["t10k"][0])


def test_fashion_mnist_comes_from_the_system_package(tmp_path, monkeypatch):
    monkeypatch.setattr(idx, "DEBIAN_FASHION_MNIST", tmp_path / "package")
    arrays = write_mnist(tmp_path / "package", train=7)
    write_mnist(tmp_path / "raw" / "fashion-mnist", train=4, seed=1)
    source, images, _ = read_all(Data(source="fashion-mnist"), tmp_path / "raw")
    assert (
        np.array_equal(np.stack(images)[..., 0], arrays["train"][0])
        and source.classes[9] == "ankle boot"
    )


def header(*shape):
    return b"\0\0\x08\x03" + struct.pack(">3i", *shape)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda whole: whole[:-1], "truncated or corrupt: it has 199 values"),
        (lambda whole: whole + b"x", "truncated or corrupt: it has more than 200 values"),
        (lambda whole: whole[:9], "truncated or corrupt"),
        (lambda whole: b"\0\0\x0d\x03" + whole[4:], "not an idx file of unsigned bytes"),
        (lambda whole: b"", "starts with nothing"),
        (lambda whole: header(-1, 28, 28), "its header states"),
        (lambda whole: header(-2, -5, 10) + bytes(100), "its header states"),
        (lambda whole: header(2**31 - 1, 2**31 - 1, 28), "its header states"),
    ],
)
@pytest.mark.parametrize("name", ["a.gz", "a"])
def test_a_damaged_idx_file_is_refused(tmp_path, name, content, message):
    write_idx(tmp_path / "whole", np.zeros((2, 10, 10)))
    damaged = content((tmp_path / "whole").read_bytes())
    (tmp_path / name).write_bytes(gzip.compress(damaged) if name.endswith(".gz") else damaged)
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / name)


@pytest.mark.parametrize("keep", [0, 3, 20, -9, -1])
def test_a_truncated_gzip_is_refused(tmp_path, keep):
    write_idx(tmp_path / "a.gz", np.random.default_rng(0).integers(0, 256, (2, 10, 10)))
    (tmp_path / "a.gz").write_bytes((tmp_path / "a.gz").read_bytes()[:keep])
    with pytest.raises(DataError, match=r"a\.gz"):
        read_idx(tmp_path / "a.gz")


def test_labels_of_another_length_or_out_of_range_are_refused(tmp_path):
    write_mnist(tmp_path / "mnist")
    for labels, message in ((np.zeros(4), "belong together"), (np.full(5, 10), r"expected 0\.\.9")):
        write_idx(tmp_path / "mnist" / "train-labels-idx1-ubyte.gz", labels)
        with pytest.raises(DataError, match=message):
            read_source(Data(source="mnist"), tmp_path)


@pytest.mark.parametrize(
    "place", ["raw/emnist", "raw/emnist/gzip", "raw/EMNIST/raw", "elsewhere", "elsewhere/gzip"]
)
def test_emnist_is_turned_upright_and_needs_no_test_files(tmp_path, place):
    upright = np.zeros((2, 28, 28), np.uint8)
    upright[:, 4, 3:20] = 255  # a horizontal bar
    write_idx(
        tmp_path / place / "emnist-balanced-train-images-idx3-ubyte.gz", upright.transpose(0, 2, 1)
    )
    write_idx(tmp_path / place / "emnist-balanced-train-labels-idx1-ubyte.gz", np.array([0, 46]))
    path = str(tmp_path / "elsewhere") if "elsewhere" in place else None
    source, images, labels = read_all_public(
        Public(source="emnist", path=path), (1, 28, 28), tmp_path / "raw"
    )
    assert np.array_equal(images[..., 0], upright) and labels.tolist() == [0, 46]
    assert len(source.classes) == 47 and source.classes[46] == "t" and source.classes[10] == "A"


def test_kmnist_takes_the_training_part_alone(tmp_path):
    arrays = write_mnist(tmp_path / "kmnist")
    for file in (tmp_path / "kmnist").glob("t10k*"):
        file.unlink()
    source, images, labels = read_all_public(Public(source="kmnist"), (1, 28, 28), tmp_path)
    assert np.array_equal(images[..., 0], arrays["train"][0])
    assert source.classes[:2] == ("o", "ki") and labels.tolist() == [0, 1, 2, 3, 4]


def test_no_more_is_unpacked_than_the_header_states(tmp_path):
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(header(1, 28, 28) + bytes(2**26)))
    tracemalloc.start()
    with pytest.raises(DataError, match="more than 784 values"):
        read_idx(tmp_path / "bomb.gz")
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()
