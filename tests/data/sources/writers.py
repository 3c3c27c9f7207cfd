"""Writers of small files in the forms that the sources expect, and readers of all images of a
source.
"""

import gzip

import numpy as np
from PIL import Image

from sfumato.data.sources import read_public, read_source
from sfumato.settings.data import Data


def write_idx(path, array):
    """Write an idx file of unsigned bytes, compressed if its name ends in .gz."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder, train=5, test=3, suffix=".gz", seed=0):
    """Write the four files of MNIST. Returns {"train" or "t10k": (images (N, 28, 28), labels
    (N,))}.
    """
    rng = np.random.default_rng(seed)
    arrays = {}
    for split, count in (("train", train), ("t10k", test)):
        arrays[split] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8), np.arange(count) % 10
        write_idx(folder / f"{split}-images-idx3-ubyte{suffix}", arrays[split][0])
        write_idx(folder / f"{split}-labels-idx1-ubyte{suffix}", arrays[split][1])
    return arrays


def write_folder(root, classes=("cat", "dog"), per_class=3, shape=(6, 6, 3)):
    """Write a folder per class, with pictures 0.png, 1.png and so on of `shape` (H, W, C). Returns
    the root.
    """
    rng = np.random.default_rng(1)
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            array = rng.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(array[..., 0] if shape[2] == 1 else array).save(
                root / name / f"{i}.png"
            )
    return root


NPZ = {
    "images": np.arange(4 * 3 * 3, dtype=np.uint8).reshape(4, 3, 3),
    "labels": np.array([0, 1, 0, 1], np.int16),
    "classes": np.array(["a", "b"]),
}


def write_npz(tmp_path, **changes):
    """Write the arrays of NPZ, with changes (None leaves an array out), to set.npz. Returns the
    settings that read it.
    """
    np.savez(
        tmp_path / "set.npz",
        **{key: value for key, value in {**NPZ, **changes}.items() if value is not None},
    )
    return Data(source="npz", path=str(tmp_path / "set.npz"))


def write_public(path, count, labels=None):
    """Write public images of three classes, in colour and with 32 pixels per side. Returns them,
    (N, 32, 32, 3).
    """
    images = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(count) % 3 if labels is None else labels
    np.savez(path, images=images, labels=labels, classes=np.array(["a", "b", "c"]))
    return images


def read_all(data, raw):
    """Read a sensitive source. Returns it, its training images (a list, because they may differ in
    shape) and labels.
    """
    source = read_source(data, raw)
    images, labels = zip(*source.train, strict=True)
    return source, list(images), list(labels)


def read_all_public(public, shape, raw, seed=0):
    """Read a public source at `shape` (C, H, W). Returns it, its images (N, H, W, C) and labels
    (N,).
    """
    source = read_public(public, shape, raw, seed)
    images, labels = zip(*source.train, strict=True)
    assert source.test is None and source.size == len(images)
    return source, np.stack(images), np.array(labels)
