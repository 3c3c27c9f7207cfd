"""Fixtures that many tests share."""

import zlib

import numpy as np
import pytest

from sfumato.data.images import ImageSet


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first, so that with two workers it does not come last and alone."""
    items.sort(key=lambda item: item.path.name not in ("test_pipeline.py", "test_killed_pipeline.py"))


@pytest.fixture(autouse=True)
def fixed_hold_outs(request, monkeypatch):
    """Keys that follow from the test: by chance, a small set has no image to hold out now and then, and is refused."""
    random = np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
    monkeypatch.setattr("sfumato.data.prepare.token_bytes", random.bytes)


@pytest.fixture(scope="session")
def digits() -> ImageSet:
    """scikit-learn's 1797 digits: (1797, 8, 8, 1) uint8."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    return ImageSet(images, bunch.target.astype(np.int64), tuple(str(i) for i in range(10)))
