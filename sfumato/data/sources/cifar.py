"""CIFAR-10 and CIFAR-100, from their binary versions or through torchvision."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sfumato.data.images import check_labels
from sfumato.data.sources.source import Request, Source, download, examples
from sfumato.errors import DataError

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
"""


@dataclass(frozen=True)
class Cifar:
    """The names and files of one of the two sets. `label_bytes`: bytes before each image; the last one is its label."""

    torchvision: str
    archive: str
    folder: str
    train: tuple[str, ...]
    test: str
    classes: tuple[str, ...]
    label_bytes: int


PARTS = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
FINE = tuple(CIFAR100_NAMES.split())
CIFARS = {
    "cifar10": Cifar(
        "CIFAR10", "cifar-10-binary.tar.gz", "cifar-10-batches-bin", PARTS, "test_batch.bin", CIFAR10_CLASSES, 1
    ),
    "cifar100": Cifar("CIFAR100", "cifar-100-binary.tar.gz", "cifar-100-binary", ("train.bin",), "test.bin", FINE, 2),
}


def read_cifar(request: Request, raw: Path) -> Source:
    """Read the binary files in `request.path` or in their folder under `raw`; without a path, download missing ones."""
    known = CIFARS[request.name]
    place = raw / known.folder if request.path is None else Path(request.path).expanduser()
    splits = [known.train, (known.test,)] if request.sensitive else [known.train]
    files = [[place / name for name in split] for split in splits]
    if all(path.is_file() for split in files for path in split):
        batches = [[read_batch(path, known) for path in split] for split in files]
        parts = [tuple(np.concatenate(arrays) for arrays in zip(*split, strict=True)) for split in batches]
    elif request.path is not None:
        wanted = ", ".join(path.name for split in files for path in split)
        fix = f"point {request.section}.path at the binary version of {known.torchvision}"
        raise DataError(f"{place} does not hold {wanted}: {fix}.")
    else:
        fix = f"Unpack {known.archive} so that {files[0][0]} exists"
        sets = download(known.torchvision, raw, fix, test=request.sensitive)
        parts = [(part.data, np.array(part.targets)) for part in sets]
    train, *test = [examples(images, labels, request, known.torchvision) for images, labels in parts]
    return Source(known.classes, train, test[0] if test else None, sum(len(labels) for _, labels in parts))


def read_batch(path: Path, known: Cifar) -> tuple[np.ndarray, np.ndarray]:
    """One binary file: rows of the label bytes, then 1024 red, 1024 green and 1024 blue bytes."""
    content, row = np.fromfile(path, np.uint8), known.label_bytes + 3072
    if len(content) == 0 or len(content) % row:
        raise DataError(f"{path} has {len(content)} bytes, not a multiple of {row}: it is truncated. Fetch it again.")
    rows = content.reshape(-1, row)
    labels = rows[:, known.label_bytes - 1]
    check_labels(labels, known.classes, path)
    return rows[:, known.label_bytes :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels.astype(np.int64)
