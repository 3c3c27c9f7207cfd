"""Pictures of an evaluation.

The pictures show real images, or numbers computed from real images, so they are local and never
part of a release.
"""

import io
from pathlib import Path

import numpy as np

from sfumato.data.images import ImageSet, having
from sfumato.evaluation.detector import Detected
from sfumato.evaluation.extractors import Extractor
from sfumato.evaluation.metrics.neighbours import nearest_rows
from sfumato.evaluation.scores import SEARCHED, subsample
from sfumato.storage.files import write_local
from sfumato.storage.png import to_grid

CAPTION = "local: not for release"
PAIRS = 6  # Pairs per class


def plot_neighbours(extractor: Extractor, synthetic: ImageSet, train: ImageSet, path: Path) -> None:
    """Plot the released images nearest to training images, each beside its nearest training image.

    Each of the first 20 classes has a row of at most PAIRS pairs.
    """
    synthetic = subsample(synthetic)
    train = subsample(train, SEARCHED)
    index, distance = nearest_rows(extractor(synthetic.images), extractor(train.images))
    classes = range(min(len(synthetic.classes), 20))
    scale = max(1, round(48 / max(synthetic.images.shape[1:3])))
    blank = framed(np.full_like(synthetic.images[0], 255), scale, (255, 255, 255))
    tiles = []
    distance_labels = []
    for label in classes:
        of_class = np.flatnonzero(having(synthetic.labels, label))
        closest = of_class[np.argsort(distance[of_class], kind="stable")[:PAIRS]]
        for i in closest:
            blue = framed(synthetic.images[i], scale, (37, 99, 168))
            tiles += [blue, framed(train.images[index[i]], scale, (224, 122, 31))]
        tiles += [blank] * (2 * (PAIRS - len(closest)))
        distance_labels.append(f"{distance[closest[0]]:.3g}" if len(closest) else "")
    canvas = to_grid(np.stack(tiles).transpose(0, 3, 1, 2) / 255, 2 * PAIRS)
    figure = new_figure(canvas.shape[1] / 100 + 1.9, canvas.shape[0] / 100 + 0.8)
    axes = figure.subplots()
    axes.imshow(canvas, interpolation="nearest")
    middles = [(row + 0.5) * canvas.shape[0] / len(classes) for row in range(len(classes))]
    axes.set_yticks(middles, [synthetic.classes[label][:16] for label in classes], fontsize=9)
    axes.set_xticks([])
    right_axis = axes.secondary_yaxis("right")
    right_axis.set_yticks(middles, distance_labels, fontsize=8, color="#666666")
    right_axis.set_ylabel("least distance", fontsize=8, color="#666666")
    for side in (axes, right_axis):
        side.tick_params(length=0)
        side.spines[:].set_visible(False)
    figure.suptitle(
        f"Closest pairs of a synthetic image (blue) and a training image (orange)\n{CAPTION}",
        fontsize=10,
    )
    save(figure, path)


def plot_detected(detected: Detected, path: Path) -> None:
    """Plot the images that the detector classifies with most confidence: released images classified
    as released, released images classified as real, and real images classified as real.
    """
    released_rows = np.flatnonzero(detected.drawn)
    real_rows = np.flatnonzero(~detected.drawn)
    ranked = released_rows[np.argsort(-detected.scores[released_rows], kind="stable")]
    parts = {
        "released images, recognised as released": ranked,
        "released images, mistaken for real": ranked[::-1],
        "real images, recognised as real": real_rows[
            np.argsort(detected.scores[real_rows], kind="stable")
        ],
    }
    columns = 16
    figure = new_figure(columns * 0.5 + 0.4, len(parts) * 1.85 + 0.5)
    for axes, (title, order) in zip(figure.subplots(len(parts), 1), parts.items(), strict=True):
        grid = to_grid(detected.images[order[: 3 * columns]].transpose(0, 3, 1, 2) / 255, columns)
        axes.imshow(np.broadcast_to(grid, (*grid.shape[:2], 3)), interpolation="nearest")
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_axis_off()
    figure.suptitle(
        "A small network distinguishes released images from real ones with an accuracy of "
        f"{100 * detected.accuracy:.1f} % (guessing: 50 %)\n{CAPTION}",
        fontsize=10,
    )
    save(figure, path)


def framed(image: np.ndarray, scale: int, colour: tuple[int, int, int]) -> np.ndarray:
    """Convert an image, (H, W, C) uint8, to RGB, magnify it, and add a frame two pixels wide."""
    larger = (
        np.broadcast_to(image, (*image.shape[:2], 3)).repeat(scale, axis=0).repeat(scale, axis=1)
    )
    tile = np.full((larger.shape[0] + 4, larger.shape[1] + 4, 3), colour, dtype=np.uint8)
    tile[2:-2, 2:-2] = larger
    return tile


def new_figure(width: float, height: float):
    from matplotlib.figure import Figure  # imported only when used, because it is heavy

    return Figure(figsize=(width, height), layout="constrained")


def save(figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], dpi=150)
    write_local(path, buffer.getbuffer())
