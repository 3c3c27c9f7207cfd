"""Fixtures that many tests share."""

import numpy as np
import pytest

from sfumato.images import ImageSet


@pytest.fixture(scope="session")
def digits() -> ImageSet:
    """scikit-learn's 1797 digits: (1797, 8, 8, 1) uint8."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    return ImageSet(images, bunch.target.astype(np.int64), tuple(str(i) for i in range(10)))
