"""A cache of features on disk, keyed by what they are computed from: the images' bytes and the extractor's weights.

The key holds no path and no date. Features of real images are as sensitive as the images: only the owner can read them.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np

from sfumato.evaluation.extractors import Extractor
from sfumato.storage.files import replace_private

KEPT = 24  # files; those unused for longest are deleted first


def features_of(extractor: Extractor, images: np.ndarray, directory: Path | None = None) -> np.ndarray:
    """(N, H, W, C) uint8 -> (N, D) float32, read from `directory`, or computed and written there. None: no cache."""
    if directory is None:
        return extractor(images)
    path = directory / f"{key_of(extractor, images)}.npy"
    found = read_features(path, (len(images), extractor.dimension))
    if found is None:
        found = extractor(images)
        np.save(content := io.BytesIO(), found, allow_pickle=False)
        replace_private(path, content.getbuffer())
        prune(directory)
    return found


def key_of(extractor: Extractor, images: np.ndarray) -> str:
    """sha256 over the extractor's digest and the images' type, shape and bytes, read in pieces."""
    digest = hashlib.sha256(f"{extractor.digest} {images.dtype} {images.shape} ".encode())
    for start in range(0, len(images), 4096):
        digest.update(np.ascontiguousarray(images[start : start + 4096]).tobytes())
    return digest.hexdigest()


def read_features(path: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """The features in the file; None where it is missing, damaged or of another shape: they are then computed again."""
    try:
        features = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    fits = isinstance(features, np.ndarray) and (features.shape, features.dtype) == (shape, np.float32)
    if not fits or not np.isfinite(features).all():
        return None
    path.touch()  # marks it as used, so that it is pruned last
    return features


def prune(directory: Path) -> None:
    by_use = sorted(directory.glob("*.npy"), key=lambda path: path.stat().st_mtime)
    for path in by_use[:-KEPT]:
        path.unlink(missing_ok=True)
