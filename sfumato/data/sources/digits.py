"""scikit-learn's handwritten digits, which come with the package."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sfumato.data.sources.source import Request, Source, examples


def read_digits(request: Request, raw: Path) -> Source:
    """1797 images, 8×8, 0..16 scaled to 0..255."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    return Source(tuple("0123456789"), examples(images, bunch.target, request, "digits"), None, len(images))
