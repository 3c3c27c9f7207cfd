"""Where images come from: scikit-learn's digits, MNIST-like files, CIFAR-10, a folder of pictures, an `.npz` file.

Every source yields one image at a time, already converted to the asked size and channels, so a set is never held in memory
decoded. What happens to an image depends on that image and on `config.Data` alone.
"""

from __future__ import annotations

import gzip
import socket
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sfumato.config import Data
from sfumato.errors import ConfigError, DataError
from sfumato.images import GROUPS, GROUPS_REFUSED

if TYPE_CHECKING:
    from PIL.Image import Image

Example = tuple[np.ndarray, int]  # (H, W, C) uint8 and its label

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # where the package dataset-fashion-mnist puts it
DIGITS = tuple("0123456789")
FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_BATCHES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
DOWNLOAD_TIMEOUT = 60.0  # seconds without an answer


@dataclass(frozen=True)
class Source:
    """A labelled source. `train` and `test` are read once; `test` is None where the source has no official test split."""

    classes: tuple[str, ...]
    train: Iterable[Example]
    test: Iterable[Example] | None
    size: int  # images in all, for a progress bar; not public


def read_source(data: Data, raw: Path) -> Source:
    """Open the source that `data` names; `raw` is the folder of downloads.

    Names and array shapes are checked here; pictures are decoded, and can be refused, while they are iterated over.
    Raises ConfigError where `data` is incomplete, DataError where files are missing or unusable.
    """
    readers: dict[str, Callable[[Data, Path], Source]] = {
        "digits": read_digits,
        "fashion-mnist": read_mnist_like,
        "mnist": read_mnist_like,
        "cifar10": read_cifar10,
        "imagefolder": read_imagefolder,
        "npz": read_npz,
    }
    source = readers[data.source](data, raw)
    if len(source.classes) < 2:
        raise DataError(f"data.source={data.source} has one class only ({source.classes[0]}): give two or more.")
    return source


# ---------------------------------------------------------------------------------------------------------------- sources


def read_digits(data: Data, raw: Path) -> Source:
    """scikit-learn's 1797 handwritten digits, 8×8, 0..16 scaled to 0..255."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    return Source(DIGITS, examples(images, bunch.target, data, "digits"), None, len(images))


def read_mnist_like(data: Data, raw: Path) -> Source:
    """MNIST or Fashion-MNIST from four idx files, gzipped or not: `data.path`, else the usual places, else a download."""
    name, folder = {"mnist": ("MNIST", "mnist"), "fashion-mnist": ("FashionMNIST", "fashion-mnist")}[data.source]
    places = [raw / folder, raw / name / "raw"]  # the second is torchvision's
    if data.source == "fashion-mnist":
        places.insert(0, DEBIAN_FASHION_MNIST)
    if data.path is not None:
        places = [Path(data.path)]
    stems = [f"{split}-{kind}" for split in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    files = first_with_all(places, stems)
    if files is None and data.path is None:
        download(name, raw, f"Put the files {', '.join(f'{stem}.gz' for stem in stems)} into {raw / folder} by hand")
        files = first_with_all(places, stems)
    if files is None:
        raise DataError(f"{', '.join(map(str, places))}: none holds {', '.join(f'{stem}[.gz]' for stem in stems)}.")
    train, train_labels, test, test_labels = (read_idx(path) for path in files)
    for path, images, labels in ((files[0], train, train_labels), (files[2], test, test_labels)):
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise DataError(f"{path} has shape {images.shape} and its labels {labels.shape}: not images and labels that belong together.")
    classes = FASHION if data.source == "fashion-mnist" else DIGITS
    check_labels(train_labels, classes, files[1])
    check_labels(test_labels, classes, files[3])
    parts = (examples(train, train_labels, data, files[0].name), examples(test, test_labels, data, files[2].name))
    return Source(classes, *parts, len(train) + len(test))


def first_with_all(places: list[Path], stems: list[str]) -> list[Path] | None:
    """The files of the first folder that holds all of `stems`, each gzipped or plain."""
    for place in places:
        found = [next((path for path in (place / f"{stem}.gz", place / stem) if path.is_file()), None) for stem in stems]
        whole = [path for path in found if path is not None]
        if len(whole) == len(stems):
            return whole
    return None


def read_idx(path: Path) -> np.ndarray:
    """An idx file of unsigned bytes: magic 0, 0, 8, rank; then one big-endian int32 per axis; then the bytes."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is truncated or corrupt ({error}): fetch it again.") from error
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise DataError(f"{path} is no idx file of unsigned bytes: it starts with {content[:4].hex() or 'nothing'}, expected 000008.")
    rank = content[3]
    if len(content) < 4 + 4 * rank:
        raise DataError(f"{path} is truncated or corrupt: its header stops short. Fetch it again.")
    shape = tuple(int(n) for n in np.frombuffer(content, ">i4", count=rank, offset=4))
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * rank)
    if len(values) != np.prod(shape, dtype=np.int64):
        raise DataError(f"{path} is truncated or corrupt: {len(values)} values for shape {shape}. Fetch it again.")
    return values.reshape(shape)


def read_cifar10(data: Data, raw: Path) -> Source:
    """CIFAR-10 from its binary files (`data.path` or `cifar-10-batches-bin` under `raw`), else by torchvision, which checks them."""
    place = raw / "cifar-10-batches-bin" if data.path is None else Path(data.path)
    files = [place / name for name in (*CIFAR10_BATCHES, "test_batch.bin")]
    if all(path.is_file() for path in files):
        parts = [read_cifar10_batch(path) for path in files]
        train, train_labels = (np.concatenate(arrays) for arrays in zip(*parts[:5], strict=True))
        test, test_labels = parts[5]
    elif data.path is not None:
        raise DataError(f"{place} does not hold {', '.join(path.name for path in files)}: point data.path at CIFAR-10's binary version.")
    else:
        fix = f"Unpack cifar-10-binary.tar.gz so that {files[0]} exists"
        train_set, test_set = download("CIFAR10", raw, fix)
        (train, train_labels), (test, test_labels) = ((part.data, np.array(part.targets)) for part in (train_set, test_set))
    name = "CIFAR-10"
    return Source(CIFAR10, examples(train, train_labels, data, name), examples(test, test_labels, data, name), len(train) + len(test))


def read_cifar10_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """One binary batch: rows of a label byte, then 1024 red, 1024 green and 1024 blue bytes."""
    content = np.fromfile(path, np.uint8)
    if len(content) == 0 or len(content) % 3073:
        raise DataError(f"{path} has {len(content)} bytes, no multiple of 3073: it is truncated. Fetch it again.")
    rows = content.reshape(-1, 3073)
    check_labels(rows[:, 0], CIFAR10, path)
    return rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, 0].astype(np.int64)


def download(name: str, raw: Path, fix: str) -> tuple:
    """Let torchvision fetch and verify dataset `name` under `raw`; returns its (train, test) datasets."""
    from torchvision import datasets  # heavy: only when used

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT)
    try:
        return tuple(getattr(datasets, name)(raw, train=train, download=True) for train in (True, False))
    except (OSError, RuntimeError) as error:  # no network, a broken file, a full disk
        raise DataError(f"the download of {name} failed ({error}). {fix}.") from error
    finally:
        socket.setdefaulttimeout(before)


def read_npz(data: Data, raw: Path) -> Source:
    """`images` (N, H, W) or (N, H, W, C) uint8, `labels` (N,) integers, `classes`: the names, as an array of strings.

    The names must be in the file: counting the labels instead would make the public class list depend on who is in the set.
    """
    path = required_path(data)
    if not path.is_file():
        raise DataError(f"data.path={path} is no file: expected an .npz with images, labels and classes.")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except (ValueError, OSError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read as .npz without pickle ({error}): write it with np.savez and plain arrays.") from error
    missing = [key for key in ("images", "labels", "classes") if key not in arrays]
    if missing:
        raise DataError(f"{path} has no array named {', '.join(missing)}: write it with np.savez(path, images=…, labels=…, classes=…).")
    if "groups" in arrays:
        raise DataError(f"{path}: `groups` {GROUPS_REFUSED}.")
    images, labels, classes = arrays["images"], arrays["labels"], arrays["classes"]
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        raise DataError(f"{path}: images are {images.dtype} {images.shape}, expected uint8 (N, H, W) or (N, H, W, C) with C 1 or 3.")
    if labels.dtype.kind not in "iu" or labels.shape != (len(images),):
        raise DataError(f"{path}: labels are {labels.dtype} {labels.shape}, expected integers ({len(images)},).")
    if not len(images):
        raise DataError(f"{path} holds no images.")
    if classes.dtype.kind != "U" or classes.ndim != 1 or not len(classes) or len(set(classes)) != len(classes):
        raise DataError(f"{path}: classes are {classes.dtype} {classes.shape}, expected distinct names, an array of strings.")
    names = tuple(str(name) for name in classes)
    check_labels(labels, names, path)
    return Source(names, examples(images, labels, data, path.name), None, len(images))


def read_imagefolder(data: Data, raw: Path) -> Source:
    """A folder with one folder of pictures per class, in the order of their names; hidden files are ignored."""
    path = required_path(data)
    if not path.is_dir():
        raise DataError(f"data.path={path} is no folder: expected one folder of pictures per class.")
    entries = visible(path)
    folders = [entry for entry in entries if entry.is_dir()]
    loose = [entry.name for entry in entries if not entry.is_dir() and is_picture(entry)]
    if (path / GROUPS).exists():
        raise DataError(f"{path / GROUPS} {GROUPS_REFUSED}.")
    if loose:
        raise DataError(f"{path / loose[0]} lies outside a class: move it into a folder named after its class.")
    if not folders:
        raise DataError(f"data.path={path} is empty: expected one folder of pictures per class.")
    files: list[tuple[Path, int]] = []
    for label, folder in enumerate(folders):
        pictures = visible(folder)
        if not pictures:
            raise DataError(f"{folder} is empty: a class without pictures. Fill it or remove it.")
        for picture in pictures:
            if picture.is_dir():
                raise DataError(f"{picture} is a folder inside a class: pictures must lie directly in their class's folder.")
            files.append((picture, label))
    return Source(tuple(folder.name for folder in folders), pictures_of(files, data), None, len(files))


# --------------------------------------------------------------------------------------------------------- helpers, in use order


def required_path(data: Data) -> Path:
    if data.path is None:
        raise ConfigError(f"data.path is missing: data.source={data.source} needs it.")
    return Path(data.path).expanduser()


def visible(folder: Path) -> list[Path]:
    return sorted((entry for entry in folder.iterdir() if not entry.name.startswith(".")), key=lambda entry: entry.name)


def is_picture(path: Path) -> bool:
    from PIL.Image import registered_extensions

    return path.suffix.lower() in registered_extensions()


def check_labels(labels: np.ndarray, classes: tuple[str, ...], path: Path) -> None:
    if len(labels) and not (labels.min() >= 0 and labels.max() < len(classes)):
        raise DataError(f"{path} has labels {labels.min()}..{labels.max()}, expected 0..{len(classes) - 1} for {len(classes)} classes.")


def examples(images: np.ndarray, labels: np.ndarray, data: Data, name: str) -> Iterator[Example]:
    """Array rows one by one, (H, W) or (H, W, C) uint8, converted as `data` asks."""
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        yield fit(image if image.ndim == 3 else image[..., None], data, f"{name}, image {i}"), int(label)


def pictures_of(files: list[tuple[Path, int]], data: Data) -> Iterator[Example]:
    """Picture files decoded one by one. All must come out alike: a first one that differs from the others is an error."""
    first: tuple[Path, tuple[int, ...]] | None = None
    for path, label in files:
        image = fit(decode(path), data, str(path))
        first = first or (path, image.shape)
        if image.shape != first[1]:
            differs = {"data.size": image.shape[:2] != first[1][:2], "data.channels": image.shape[2] != first[1][2]}
            wish = " and ".join(key for key, value in differs.items() if value)
            raise DataError(f"{path} is {describe(image.shape)} but {first[0]} is {describe(first[1])}: set {wish} to convert all alike.")
        yield image, label


def describe(shape: tuple[int, ...]) -> str:
    return f"{shape[0]}×{shape[1]} {'grey' if shape[2] == 1 else 'colour'}"


def decode(path: Path) -> np.ndarray:
    """A picture file as (H, W, 1) or (H, W, 3) uint8: upright, 16-bit grey divided by 256, transparency laid on black."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            if (frames := getattr(opened, "n_frames", 1)) > 1:
                raise DataError(f"{path} holds {frames} frames: save the one to use as a picture of its own.")
            opened.load()
            picture: Image.Image = ImageOps.exif_transpose(opened)
    except (OSError, SyntaxError, ValueError, EOFError, zlib.error, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image ({error}): repair or remove it.") from error
    if picture.mode.startswith("I;16"):
        return (np.asarray(picture).astype(np.uint16) >> 8).astype(np.uint8)[..., None]
    if picture.mode in ("I", "F"):
        raise DataError(f"{path} has 32-bit pixels, whose range nothing states: save it with 8 bits, or as 16-bit grey.")
    if picture.has_transparency_data:
        grey = picture.mode in ("LA", "La", "L", "1")
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, (0, 0, 0, 255)), picture).convert("L" if grey else "RGB")
    array = np.asarray(picture.convert("L" if picture.mode in ("1", "L") else "RGB"))
    return array if array.ndim == 3 else array[..., None]


def fit(image: np.ndarray, data: Data, name: str) -> np.ndarray:
    """One image, (H, W, C) uint8, with `data.channels` channels and sides of `data.size` pixels.

    An image that is not square is cropped to its central square first. Unset fields leave the image as it is.
    """
    from PIL import ImageOps
    from PIL.Image import Resampling, fromarray

    height, width, channels = image.shape
    if not height or not width:
        raise DataError(f"{name} has no pixels ({height}×{width}): remove it.")
    if (data.size in (None, height) and data.size in (None, width)) and data.channels in (None, channels):
        return np.ascontiguousarray(image)
    picture: Image = fromarray(np.ascontiguousarray(image[..., 0] if channels == 1 else image))
    if data.channels is not None:
        picture = picture.convert("L" if data.channels == 1 else "RGB")
    if data.size is not None:
        picture = ImageOps.fit(picture, (data.size, data.size), Resampling.LANCZOS)
    array = np.asarray(picture)
    return array if array.ndim == 3 else array[..., None]
