import gzip
import sys

import numpy as np
import pytest
from PIL import Image

from sfumato.config import Data, Public
from sfumato.data.sources import idx, npz, read_public, read_source
from sfumato.data.sources.cifar import CIFAR10, CIFAR100
from sfumato.data.sources.idx import read_idx
from sfumato.errors import ConfigError, DataError


def read_all(data, raw):
    source = read_source(data, raw)
    images, labels = zip(*source.train, strict=True)
    return source, list(images), list(labels)


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder, train=5, test=3, suffix=".gz", seed=0):
    rng = np.random.default_rng(seed)
    arrays = {}
    for split, count in (("train", train), ("t10k", test)):
        arrays[split] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8), np.arange(count) % 10
        write_idx(folder / f"{split}-images-idx3-ubyte{suffix}", arrays[split][0])
        write_idx(folder / f"{split}-labels-idx1-ubyte{suffix}", arrays[split][1])
    return arrays


def write_folder(root, classes=("cat", "dog"), per_class=3, shape=(6, 6, 3)):
    rng = np.random.default_rng(1)
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            array = rng.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(array[..., 0] if shape[2] == 1 else array).save(root / name / f"{i}.png")
    return root


# ---- digits, MNIST, CIFAR-10


def test_digits_span_the_whole_range(digits, tmp_path):
    source, images, labels = read_all(Data(), tmp_path)
    assert source.test is None and source.classes == digits.classes and source.size == 1797
    assert np.array_equal(np.stack(images), digits.images) and labels == digits.labels.tolist()
    assert min(image.min() for image in images) == 0 and max(image.max() for image in images) == 255


@pytest.mark.parametrize("suffix", [".gz", ""])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw"])
def test_mnist_files_are_found_and_keep_their_official_split(tmp_path, suffix, folder):
    arrays = write_mnist(tmp_path / folder, suffix=suffix)
    source, images, labels = read_all(Data(source="mnist"), tmp_path)
    assert np.array_equal(np.stack(images)[..., 0], arrays["train"][0]) and labels == [0, 1, 2, 3, 4]
    assert np.array_equal(np.stack([image for image, _ in source.test])[..., 0], arrays["t10k"][0])


def test_fashion_mnist_comes_from_the_system_package_when_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(idx, "DEBIAN_FASHION_MNIST", tmp_path / "package")
    arrays = write_mnist(tmp_path / "package", train=7)
    write_mnist(tmp_path / "raw" / "fashion-mnist", train=4, seed=1)
    source, images, _ = read_all(Data(source="fashion-mnist"), tmp_path / "raw")
    assert np.array_equal(np.stack(images)[..., 0], arrays["train"][0]) and source.classes[9] == "ankle boot"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda whole: whole[:-1], "truncated or corrupt: 199 values"),
        (lambda whole: whole + b"x", "truncated or corrupt: 201 values"),
        (lambda whole: whole[:9], "header stops short"),
        (lambda whole: b"\0\0\x0d\x03" + whole[4:], "no idx file of unsigned bytes"),
        (lambda whole: b"", "starts with nothing"),
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
    write_idx(tmp_path / "mnist" / "train-labels-idx1-ubyte.gz", np.zeros(4))
    with pytest.raises(DataError, match="belong together"):
        read_source(Data(source="mnist"), tmp_path)
    write_idx(tmp_path / "mnist" / "train-labels-idx1-ubyte.gz", np.full(5, 10))
    with pytest.raises(DataError, match=r"expected 0\.\.9"):
        read_source(Data(source="mnist"), tmp_path)


@pytest.mark.parametrize(("name", "place"), [("mnist", "mnist"), ("cifar10", "cifar-10-batches-bin")])
def test_a_failed_download_says_where_to_put_the_files(tmp_path, monkeypatch, name, place):
    class Unreachable:
        def __getattr__(self, dataset):
            def fail(*_, **__):
                raise OSError("no route to host")

            return fail

    monkeypatch.setitem(sys.modules, "torchvision", type(sys)("torchvision"))
    sys.modules["torchvision"].datasets = Unreachable()
    with pytest.raises(DataError, match="no route to host") as caught:
        read_source(Data(source=name), tmp_path)
    assert str(tmp_path / place) in str(caught.value)


def test_a_given_path_is_never_replaced_by_a_download(tmp_path):
    for name in ("mnist", "fashion-mnist", "cifar10"):
        with pytest.raises(DataError, match="nowhere"):
            read_source(Data(source=name, path=str(tmp_path / "nowhere")), tmp_path)


def test_cifar10_binary_files_come_out_as_rows_of_rgb(tmp_path):
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    images = rng.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    rows = np.concatenate(
        [np.arange(12, dtype=np.uint8)[:, None] % 10, images.transpose(0, 3, 1, 2).reshape(12, -1)], axis=1
    )
    for i, name in enumerate((*CIFAR10.train, "test_batch.bin")):
        rows[2 * i : 2 * i + 2].tofile(folder / name)
    source, train, labels = read_all(Data(source="cifar10"), tmp_path)
    assert np.array_equal(np.stack(train), images[:10]) and labels == list(range(10))
    assert [label for _, label in source.test] == [0, 1]
    (folder / "test_batch.bin").write_bytes(b"short")
    with pytest.raises(DataError, match=r"test_batch\.bin"):
        read_source(Data(source="cifar10"), tmp_path)


# ---- image folder


def test_a_folder_gives_its_classes_and_pictures_by_name(tmp_path):
    root = write_folder(tmp_path / "in", classes=("dog", "cat"))
    (root / ".hidden").mkdir()
    (root / "cat" / ".DS_Store").write_bytes(b"x")
    (root / "README.txt").write_text("about")
    source, images, labels = read_all(Data(source="imagefolder", path=str(root)), tmp_path)
    assert source.classes == ("cat", "dog") and labels == [0, 0, 0, 1, 1, 1] and source.test is None
    assert np.array_equal(images[4], np.asarray(Image.open(root / "dog" / "1.png")))


def test_size_and_channels_convert_every_picture(tmp_path):
    root = write_folder(tmp_path / "in", shape=(6, 6, 3))
    Image.new("L", (9, 4), 77).save(root / "cat" / "other.jpg")
    Image.new("P", (3, 3)).save(root / "dog" / "palette.gif")
    for channels in (1, 3):
        _, images, _ = read_all(Data(source="imagefolder", path=str(root), size=5, channels=channels), tmp_path)
        assert {image.shape for image in images} == {(5, 5, channels)} and {image.dtype for image in images} == {
            np.dtype(np.uint8)
        }
    assert np.abs(images[3].astype(int) - 77).max() <= 2


def test_an_oblong_picture_is_cropped_to_its_centre(tmp_path):
    array = np.zeros((4, 12), np.uint8)
    array[:, 4:8] = 200
    root = write_folder(tmp_path / "in", shape=(4, 4, 1))
    Image.fromarray(array).save(root / "cat" / "0.png")
    _, images, _ = read_all(Data(source="imagefolder", path=str(root), size=4), tmp_path)
    assert (images[0] == 200).all()


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
        (spoil_empty_class, "empty", "Fill it or remove it"),
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


def test_a_missing_empty_or_single_class_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path is missing"):
        read_source(Data(source="imagefolder"), tmp_path)
    with pytest.raises(DataError, match="no folder"):
        read_source(Data(source="imagefolder", path=str(tmp_path / "nowhere")), tmp_path)
    (tmp_path / "in").mkdir()
    with pytest.raises(DataError, match="is empty"):
        read_source(Data(source="imagefolder", path=str(tmp_path / "in")), tmp_path)
    write_folder(tmp_path / "in", classes=("cat",))
    with pytest.raises(DataError, match="one class only"):
        read_source(Data(source="imagefolder", path=str(tmp_path / "in")), tmp_path)


# ---- npz

NPZ = {
    "images": np.arange(4 * 3 * 3, dtype=np.uint8).reshape(4, 3, 3),
    "labels": np.array([0, 1, 0, 1], np.int16),
    "classes": np.array(["a", "b"]),
}


def archive(tmp_path, **changes):
    np.savez(tmp_path / "set.npz", **{key: value for key, value in {**NPZ, **changes}.items() if value is not None})
    return Data(source="npz", path=str(tmp_path / "set.npz"))


def test_an_npz_gives_grey_and_colour_images(tmp_path):
    source, images, labels = read_all(archive(tmp_path), tmp_path)
    assert (
        source.classes == ("a", "b")
        and labels == [0, 1, 0, 1]
        and np.array_equal(np.stack(images)[..., 0], NPZ["images"])
    )
    _, images, _ = read_all(archive(tmp_path, images=np.zeros((4, 5, 3, 3), np.uint8)), tmp_path)
    assert images[0].shape == (5, 3, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": None}, "no array named classes"),
        ({"images": None}, "no array named images"),
        ({"images": NPZ["images"] / 255}, "expected uint8"),
        ({"images": np.zeros((4, 3, 3, 2), np.uint8)}, "C 1 or 3"),
        ({"labels": np.array([0, 1, 2, 1])}, r"expected 0\.\.1"),
        ({"labels": np.array([0, -1, 0, 1])}, r"expected 0\.\.1"),
        ({"labels": np.zeros(4)}, "expected integers"),
        ({"labels": np.zeros(5, np.int64)}, "expected integers"),
        ({"classes": np.array(["a"]), "labels": np.zeros(4, np.int64)}, "one class only"),
        ({"classes": np.array(["a", "a"])}, "distinct names"),
        ({"classes": np.array([0, 1])}, "distinct names"),
        ({"classes": np.array(["a", None], object)}, "without pickle"),
        ({"groups": np.zeros(4)}, "group privacy"),
        ({"images": NPZ["images"][:0], "labels": NPZ["labels"][:0]}, "no images"),
    ],
)
def test_an_npz_that_cannot_be_used_is_refused(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        read_source(archive(tmp_path, **changes), tmp_path)


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    for content in (b"", b"PK\x03\x04 broken", b"text"):
        (tmp_path / "set.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"set\.npz"):
            read_source(Data(source="npz", path=str(tmp_path / "set.npz")), tmp_path)
    np.save(tmp_path / "set.npy", NPZ["images"])
    for name in ("set.npy", "nowhere.npz"):
        with pytest.raises(DataError, match=name):
            read_source(Data(source="npz", path=str(tmp_path / name)), tmp_path)


# ---- public sources


def read_all_public(public, shape, raw, seed=0):
    source = read_public(public, shape, raw, seed)
    images, labels = zip(*source.train, strict=True)
    assert source.test is None and source.size == len(images)
    return source, np.stack(images), np.array(labels)


def write_emnist(folder, images, labels):
    write_idx(folder / "emnist-balanced-train-images-idx3-ubyte.gz", images)
    write_idx(folder / "emnist-balanced-train-labels-idx1-ubyte.gz", labels)


def write_imagenet32(path, count, seed=0, **changes):
    """A batch as the downsampled ImageNet has it; returns the images, (N, 32, 32, 3)."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    data, labels = images.transpose(0, 3, 1, 2).reshape(count, -1), np.arange(count) % 1000 + 1
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{"data": data, "labels": labels, "mean": data.mean(0), **changes})
    return images


@pytest.mark.parametrize("source", ["glyphs", "procedural", "photos"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 9)])
def test_drawn_sources_come_in_any_shape_and_follow_the_seed(tmp_path, source, shape):
    public = Public(source=source, per_class=2)
    opened, images, labels = read_all_public(public, shape, tmp_path)
    assert images.shape[1:] == (shape[1], shape[2], shape[0]) and images.dtype == np.uint8
    assert np.bincount(labels).tolist() == [2] * len(opened.classes)
    assert np.array_equal(read_all_public(public, shape, tmp_path)[1], images)
    assert not np.array_equal(read_all_public(public, shape, tmp_path, seed=1)[1], images)


def test_a_drawn_source_refuses_a_path(tmp_path):
    with pytest.raises(ConfigError, match="reads no files"):
        read_public(Public(source="photos", path="/photos"), (1, 8, 8), tmp_path, 0)


@pytest.mark.parametrize("place", ["raw/emnist", "raw/emnist/gzip", "raw/EMNIST/raw", "elsewhere", "elsewhere/gzip"])
def test_emnist_is_turned_upright_and_needs_no_test_files(tmp_path, place):
    upright = np.zeros((2, 28, 28), np.uint8)
    upright[:, 4, 3:20] = 255  # a bar that lies
    write_emnist(tmp_path / place, upright.transpose(0, 2, 1), np.array([0, 46]))
    path = str(tmp_path / "elsewhere") if "elsewhere" in place else None
    source, images, labels = read_all_public(Public(source="emnist", path=path), (1, 28, 28), tmp_path / "raw")
    assert np.array_equal(images[..., 0], upright) and labels.tolist() == [0, 46]
    assert len(source.classes) == 47 and source.classes[46] == "t" and source.classes[10] == "A"


def test_kmnist_takes_the_training_part_alone(tmp_path):
    arrays = write_mnist(tmp_path / "kmnist")
    for file in (tmp_path / "kmnist").glob("t10k*"):
        file.unlink()
    source, images, labels = read_all_public(Public(source="kmnist"), (1, 28, 28), tmp_path)
    assert (
        np.array_equal(images[..., 0], arrays["train"][0])
        and source.classes[:2] == ("o", "ki")
        and labels.tolist() == [0, 1, 2, 3, 4]
    )


@pytest.mark.parametrize(("known", "name"), [(CIFAR10, "cifar10"), (CIFAR100, "cifar100")])
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


def test_real_public_images_take_the_shape_of_the_sensitive_ones(tmp_path):
    images = write_imagenet32(tmp_path / "imagenet32" / "train_data_batch_1.npz", 3)
    for shape in ((1, 28, 28), (3, 16, 20), (1, 32, 32)):
        _, read, _ = read_all_public(Public(source="imagenet32"), shape, tmp_path)
        assert read.shape == (3, shape[1], shape[2], shape[0])
    weights = np.array([0.299, 0.587, 0.114])
    assert np.abs(read[..., 0] - images @ weights).max() <= 1.5  # the last one was grey at full size


def test_imagenet32_batches_are_read_in_their_order(tmp_path):
    batches = [write_imagenet32(tmp_path / f"train_data_batch_{i}.npz", 3, seed=i) for i in (1, 2, 10)]
    source, images, labels = read_all_public(Public(source="imagenet32", path=str(tmp_path)), (3, 32, 32), tmp_path)
    assert np.array_equal(images, np.concatenate(batches)) and labels.tolist() == [0, 1, 2] * 3
    assert len(source.classes) == 1000 and source.classes[999] == "class-0999"


def test_imagenet32_is_named_by_the_list_beside_it_and_names_stay_distinct(tmp_path):
    write_imagenet32(tmp_path / "train_data_batch_1.npz", 3)
    lines = [
        f"n{label:08d} {label} {'crane' if label in (7, 1000) else f'thing_{label}'}" for label in range(1000, 0, -1)
    ]
    (tmp_path / "map_clsloc.txt").write_text("\n".join(lines) + "\n")
    public = Public(source="imagenet32", path=str(tmp_path))
    classes = read_public(public, (3, 32, 32), tmp_path, 0).classes
    assert classes[0] == "thing_1" and classes[6] == "crane-n00000007" and len(set(classes)) == 1000
    (tmp_path / "map_clsloc.txt").write_text("\n".join(lines[:-1]))
    with pytest.raises(DataError, match="map_clsloc"):
        read_public(public, (3, 32, 32), tmp_path, 0)


def test_imagenet32_is_never_held_whole(tmp_path, monkeypatch):
    import tracemalloc

    write_imagenet32(tmp_path / "train_data_batch_1.npz", 4000)  # 12 MB
    monkeypatch.setattr(npz, "ROWS", 64)  # 0.2 MB
    public = Public(source="imagenet32", path=str(tmp_path))
    source = read_public(public, (3, 32, 32), tmp_path, 0)
    next(iter(source.train))  # imports
    source = read_public(public, (3, 32, 32), tmp_path, 0)
    tracemalloc.start()
    count = sum(1 for _ in source.train)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 4000 and peak < 3e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": np.zeros((3, 3 * 64 * 64), np.uint8)}, "32×32 version"),
        ({"data": np.zeros((3, 3072), np.float32)}, "expected uint8"),
        ({"data": np.asfortranarray(np.zeros((3, 3072), np.uint8))}, "row by row"),
        ({"labels": np.array([0, 1, 2])}, r"0\.\.2, expected 1\.\.1000"),
        ({"labels": np.array([1, 2, 1001])}, r"expected 1\.\.1000"),
        ({"labels": np.array([1, 2])}, "expected 3 integers"),
        ({"labels": np.array([1, 2, None], object)}, "cannot be read"),
    ],
)
def test_a_batch_of_another_form_is_refused(tmp_path, changes, message):
    write_imagenet32(tmp_path / "train_data_batch_1.npz", 3, **changes)
    with pytest.raises(DataError, match=message) as caught:
        read_public(Public(source="imagenet32", path=str(tmp_path)), (3, 32, 32), tmp_path, 0)
    assert "train_data_batch_1.npz" in str(caught.value)


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:5000], lambda whole: whole.replace(whole[3000:3010], bytes(10)), lambda whole: b""]
)
def test_a_damaged_batch_is_refused(tmp_path, damage):
    file = tmp_path / "train_data_batch_1.npz"
    write_imagenet32(file, 3)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match="fetch it again"):
        read_all_public(Public(source="imagenet32", path=str(tmp_path)), (3, 32, 32), tmp_path)


def test_missing_public_files_name_the_place_and_the_key(tmp_path):
    for name in ("emnist", "kmnist", "cifar10", "cifar100", "imagenet32", "imagefolder", "npz"):
        with pytest.raises(DataError, match="nowhere"):
            read_public(Public(source=name, path=str(tmp_path / "nowhere")), (1, 8, 8), tmp_path, 0)
    for name in ("imagefolder", "npz"):
        with pytest.raises(ConfigError, match=r"public\.path is missing"):
            read_public(Public(source=name), (1, 8, 8), tmp_path, 0)
    with pytest.raises(DataError, match="imagenet32"):
        read_public(Public(source="imagenet32"), (1, 8, 8), tmp_path, 0)


def test_a_public_folder_or_archive_may_mix_sizes_and_hold_groups(tmp_path):
    root = write_folder(tmp_path / "in")
    spoil_sizes(root)
    spoil_modes(root)
    spoil_groups(root)
    _, images, labels = read_all_public(Public(source="imagefolder", path=str(root)), (1, 5, 7), tmp_path)
    assert images.shape == (6, 5, 7, 1) and labels.tolist() == [0, 0, 0, 1, 1, 1]
    path = archive(tmp_path, groups=np.zeros(4)).path
    assert len(read_all_public(Public(source="npz", path=path), (3, 4, 4), tmp_path)[1]) == 4
