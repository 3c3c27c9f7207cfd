"""Fixtures that many tests share."""

import numpy as np
import pytest

from sfumato.data.images import ImageSet


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first, so that with two workers it does not come last and alone."""
    items.sort(key=lambda item: item.path.name not in ("test_pipeline.py", "test_killed_pipeline.py"))


@pytest.fixture(scope="session")
def digits() -> ImageSet:
    """scikit-learn's 1797 digits: (1797, 8, 8, 1) uint8."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    return ImageSet(images, bunch.target.astype(np.int64), tuple(str(i) for i in range(10)))
