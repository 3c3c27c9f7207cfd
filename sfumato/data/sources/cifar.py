"""Read CIFAR-10 and CIFAR-100 with torchvision, which verifies the checksum of each file."""

from pathlib import Path

import numpy as np

from sfumato.data.sources.source import Request, Source, download, examples


def read_cifar(request: Request, raw: Path) -> Source:
    """Read the set from its unpacked archive in `request.path`.

    Without a path, it is read from `raw`, and downloaded if it is missing there.
    """
    folder = Path(request.path or raw).expanduser()
    archive = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}[
        request.name
    ]
    fix = f"Unpack {archive} into {folder}"
    parts = download(
        request.name.upper(), folder, fix, test=request.sensitive, download=request.path is None
    )
    train, *test = [
        examples(part.data, np.array(part.targets), request, request.name) for part in parts
    ]
    return Source(tuple(parts[0].classes), train, next(iter(test), None), sum(map(len, parts)))
