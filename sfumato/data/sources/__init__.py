"""Where images come from: sets in a library, known sets in their own files, a folder of pictures, an `.npz` file.

Every source yields one image at a time, already converted to the size and the channels of the request, so no decoded
set is held in memory. The result for an image depends on that image and the request alone.
"""

from __future__ import annotations

from pathlib import Path

from sfumato.config import Data, Public
from sfumato.data.rendered import DRAWN, draw_all, drawing
from sfumato.data.sources.cifar import read_cifar10, read_cifar100
from sfumato.data.sources.idx import IDX_SETS, read_idx_set
from sfumato.data.sources.imagefolder import read_imagefolder
from sfumato.data.sources.npz import read_imagenet32, read_npz
from sfumato.data.sources.source import Example, Request, Source, examples
from sfumato.errors import ConfigError, DataError

__all__ = ["Example", "Source", "read_public", "read_source"]


def read_source(data: Data, raw: Path) -> Source:
    """Open the sensitive source that `data` names; `raw` is the folder of downloads.

    Names and array shapes are checked here. Pictures are decoded, and may be refused, during the iteration.
    Raises ConfigError where `data` is incomplete, DataError where files are missing or unusable.
    """
    size = None if data.size is None else (data.size, data.size)
    return open_source(
        Request(section="data", name=data.source, path=data.path, size=size, channels=data.channels), raw
    )


def read_public(public: Public, shape: tuple[int, int, int], raw: Path, seed: int) -> Source:
    """Open the training part of the public source that `public` names, with images (H, W, C) for `shape` (C, H, W).

    `seed` fixes the images of a drawn source. Raises what `read_source` raises.
    """
    channels, height, width = shape
    if public.source in DRAWN:
        if public.path is not None:
            raise ConfigError(
                f"public.path={public.path} means nothing for public.source={public.source}, which reads no files: "
                "leave it out."
            )
        classes, draw = drawing(public.source, shape, public.fonts)
        return Source(
            classes, draw_all(draw, len(classes), public.per_class, seed), None, len(classes) * public.per_class
        )
    return open_source(
        Request(section="public", name=public.source, path=public.path, size=(height, width), channels=channels), raw
    )


def open_source(request: Request, raw: Path) -> Source:
    if request.name in IDX_SETS:
        source = read_idx_set(request, raw)
    elif request.name == "digits":
        source = read_digits(request)
    elif request.name in (
        readers := {"cifar10": read_cifar10, "cifar100": read_cifar100, "imagenet32": read_imagenet32}
    ):
        source = readers[request.name](request, raw)
    else:
        source = {"imagefolder": read_imagefolder, "npz": read_npz}[request.name](request)
    if len(source.classes) < 2:
        raise DataError(
            f"{request.section}.source={request.name} has one class only ({source.classes[0]}): give two or more."
        )
    return source


def read_digits(request: Request) -> Source:
    """scikit-learn's 1797 handwritten digits, 8×8, 0..16 scaled to 0..255."""
    import numpy as np
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    return Source(tuple("0123456789"), examples(images, bunch.target, request, "digits"), None, len(images))
