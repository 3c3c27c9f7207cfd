"""Find public images that are also sensitive or hold-out images: such images have no guarantee.

Exact duplicates only, once both are in the stored shape. A copy that was recoloured or compressed with loss has other
bytes, so it is not found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b

import numpy as np

from sfumato.data.images import ImageSet
from sfumato.errors import DataError


def refuse_overlap(public: ImageSet, private: Iterable[ImageSet]) -> None:
    """Raise DataError, which is local, where a public image is among the private ones."""
    found = overlapping(public, private)
    if len(found):
        shown = ", ".join(map(str, found[:10])) + (", …" if len(found) > 10 else "")
        raise DataError(
            f"local, not to be shared: {len(found)} of the {len(public)} public images are sensitive or hold-out "
            f"images too, byte for byte (public images {shown}). What is public has no guarantee: "
            "take them out of the public source, or choose another"
        )


def overlapping(public: ImageSet, private: Iterable[ImageSet]) -> np.ndarray:
    """Indices of the public images with the same bytes as a private one, ascending, (n,) int64. Labels do not matter.

    It reads every image once, in order. Memory: about 100 bytes for each private image.
    """
    known = {digest for image_set in private for digest in digests(image_set.images)}
    return np.array([i for i, digest in enumerate(digests(public.images)) if digest in known], dtype=np.int64)


def digests(images: np.ndarray) -> Iterator[bytes]:
    """A digest of 16 bytes for each image, (N, H, W, C) uint8: of its shape and its pixels."""
    height, width, channels = images.shape[1:]
    shape = repr((channels, height, width)).encode()
    for image in images:
        yield blake2b(shape + image.tobytes(), digest_size=16).digest()
