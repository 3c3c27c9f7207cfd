"""CIFAR-10 and CIFAR-100, as torchvision reads them: each file by its known checksum."""

from pathlib import Path

import numpy as np

from sfumato.data.sources.source import Request, Source, download, examples


def read_cifar(request: Request, raw: Path) -> Source:
    """The set whose archive is unpacked in `request.path` or in `raw`; without a path, it is downloaded if missing."""
    place = Path(request.path or raw).expanduser()
    archive = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}[request.name]
    fix = f"Unpack {archive} into {place}"
    parts = download(request.name.upper(), place, fix, test=request.sensitive, download=request.path is None)
    train, *test = [examples(part.data, np.array(part.targets), request, request.name) for part in parts]
    return Source(tuple(parts[0].classes), train, next(iter(test), None), sum(map(len, parts)))
