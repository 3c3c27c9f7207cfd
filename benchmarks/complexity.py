"""Measure how complex images are, by the entropy of their grey levels and of their local patterns.

    python benchmarks/complexity.py

FETA-Pro orders its curriculum by complexity: central images, then auxiliary images, then real
ones. Run this program in a project that has made a release. The results are local, because the
last row is computed from real images. Source: FETA-Pro Table 2, Appendix C.3.
"""

from __future__ import annotations

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy import stats

from sfumato.data.images import ImageSet, as_uint8, load_images
from sfumato.data.store import read_card
from sfumato.evaluation.scores import subsample
from sfumato.privacy.authorize import open_local
from sfumato.settings.stage import ARTIFACTS, CARD_PATH
from sfumato.storage.artifacts import Artifact, read_artifact
from stages.state import state_dir

# The eight neighbours, in a circle
CIRCLE = ((-1, -1), (-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1))


def grey(images: np.ndarray) -> np.ndarray:
    """Convert (N, H, W, C) uint8, C 1 or 3, to (N, H, W) uint8 luminance (ITU-R 601)."""
    if images.shape[3] == 1:
        return images[..., 0]
    return np.rint(images @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)


def entropy(images: np.ndarray) -> np.ndarray:
    """Compute the entropy of each image's grey levels, in nats: (N, H, W, C) uint8 -> (N,)."""
    return entropies(grey(images), 256)


def texture_complexity(images: np.ndarray) -> np.ndarray:
    """Compute the entropy of each image's local binary patterns: (N, H, W, C) uint8 -> (N,).

    It is the Shannon entropy in nats, at most ln 10. A pattern marks which of the eight neighbours
    are at least as bright as the pixel, up to rotation. All patterns with more than two changes
    around the circle count as one (Ojala et al. 2002: P = 8, R = 1, uniform). FETA-Pro gives no
    formula, so compare values only within one table. Raises ValueError for images with fewer than
    three pixels per side.
    """
    plane = grey(images)
    height, width = plane.shape[1:]
    if min(height, width) < 3:
        raise ValueError(
            f"images of {height}×{width} pixels have no local patterns: each side must have at "
            "least three pixels"
        )
    centre = plane[:, 1:-1, 1:-1]
    # Whether each neighbour is at least as bright: (8, N, H-2, W-2).
    above = np.stack(
        [plane[:, 1 + i : height - 1 + i, 1 + j : width - 1 + j] >= centre for i, j in CIRCLE]
    )
    changes = (above != np.roll(above, 1, axis=0)).sum(axis=0)
    patterns = np.where(changes <= 2, above.sum(axis=0), 9)
    return entropies(patterns, 10)


def entropies(levels: np.ndarray, count: int) -> np.ndarray:
    """Compute the entropy of each row's values, in nats: (N, …) integers below `count` -> (N,)."""
    flat = levels.reshape(len(levels), -1)
    return np.asarray(
        stats.entropy(np.stack([np.bincount(row, minlength=count) for row in flat]), axis=1)
    )


def complexity(images: np.ndarray) -> dict[str, float]:
    """Return the images' mean "entropy" and "texture_complexity", and their number, "images"."""
    return {
        "entropy": float(entropy(images).mean()),
        "texture_complexity": float(texture_complexity(images).mean()),
        "images": len(images),
    }


def complexity_by_step(
    release: ImageSet, real: ImageSet, central: Artifact, auxiliary: Artifact
) -> dict[str, dict[str, float]]:
    """Measure released and real images, and the images of `central` and `auxiliary` if enabled."""
    images = {}
    if central.enabled:
        means = np.load(central.path / "mean.npy")
        images["central"] = as_uint8(torch.from_numpy(means).flatten(0, 1))
    if auxiliary.enabled:
        images["auxiliary"] = subsample(load_images(auxiliary.path, real.classes)).images
    images |= {"release": subsample(release).images, "real": subsample(real).images}
    return {name: complexity(array) for name, array in images.items()}


def main() -> None:
    central, auxiliary, synthesize = (
        read_artifact(ARTIFACTS / name, name) for name in ("central", "auxiliary", "synthesize")
    )
    real, _ = open_local(state_dir(), read_card(CARD_PATH), "complexity")
    found = complexity_by_step(load_images(synthesize.path, real.classes), real, central, auxiliary)
    table = Table("images", "entropy", "texture complexity", title="Complexity, nats (local)")
    for name, row in found.items():
        table.add_row(name, f"{row['entropy']:.3f}", f"{row['texture_complexity']:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
