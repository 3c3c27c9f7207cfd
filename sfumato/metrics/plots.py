"""Pictures of an evaluation. All of them show or rest on real images: local, never part of a release."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sfumato.images import ImageSet
from sfumato.metrics.neighbours import nearest

LOCAL = "local: not for release"
SYNTHETIC, REAL = (37, 99, 168), (224, 122, 31)  # the frames of the images, and their names in the title
MOST_CLASSES = 20


def accuracies(values: dict) -> dict[str, dict]:
    """The classifiers' entries among the metrics of one set."""
    return {name: row for name, row in values.items() if "mean" in row}


def plot_accuracy(metrics: dict, path: Path) -> None:
    """Draw the accuracies of `evaluate_release` as bars, one group per set and one bar per classifier, ± one standard deviation."""
    from matplotlib.figure import Figure  # heavy: only when used

    sets = [name for name, values in metrics.items() if isinstance(values, dict) and accuracies(values)]
    classifiers = list(accuracies(metrics[sets[0]]))
    width, colours = 0.8 / len(classifiers), ("#9db4c0", "#5c7f9c", "#253d5b")
    figure = Figure(figsize=(max(5.0, 1.2 + 0.65 * len(classifiers) * len(sets)), 3.6), layout="constrained")
    axes = figure.subplots()
    for i, classifier in enumerate(classifiers):
        places = np.arange(len(sets)) + (i - (len(classifiers) - 1) / 2) * width
        heights, spread = ([100 * metrics[name][classifier][key] for name in sets] for key in ("mean", "std"))
        bars = axes.bar(places, heights, width * 0.92, yerr=spread, capsize=3, label=classifier, color=colours[i % 3], ecolor="#444444")
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    axes.set_xticks(range(len(sets)), sets)
    axes.set_ylim(0, 110)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("accuracy on real hold-out, %")
    axes.set_title(f"Classifiers by what they were trained on ({LOCAL})", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(classifiers), frameon=False)
    save(figure, path)


def plot_neighbours(synthetic: ImageSet, train: ImageSet, features: np.ndarray, train_features: np.ndarray, path: Path, pairs: int = 6) -> None:
    """For each class, the synthetic images that come nearest to any training image, each beside that one.

    features, train_features: (N, D) and (M, D), row by row those of the two sets. If anything was copied, it is in this picture. The
    first MOST_CLASSES classes are shown.
    """
    from matplotlib.figure import Figure

    index, distance = nearest(features, train_features)
    classes = range(min(len(synthetic.classes), MOST_CLASSES))
    height, width = synthetic.images.shape[1:3]
    scale = max(1, round(48 / max(height, width)))
    tile_height, tile_width, gap = height * scale + 4, width * scale + 4, 14
    canvas = np.full((len(classes) * (tile_height + 6), pairs * (2 * tile_width + gap) - gap, 3), 255, dtype=np.uint8)
    ends = []
    for row, label in enumerate(classes):
        of_class = np.flatnonzero(synthetic.labels == label)
        closest = of_class[np.argsort(distance[of_class], kind="stable")[:pairs]]
        top = row * (tile_height + 6)
        for column, i in enumerate(closest):
            left = column * (2 * tile_width + gap)
            canvas[top : top + tile_height, left : left + tile_width] = framed(synthetic.images[i], scale, SYNTHETIC)
            canvas[top : top + tile_height, left + tile_width : left + 2 * tile_width] = framed(train.images[index[i]], scale, REAL)
        ends.append(f"{distance[closest[0]]:.3g}" if len(closest) else "")
    figure = Figure(figsize=(canvas.shape[1] / 100 + 1.9, canvas.shape[0] / 100 + 0.8), layout="constrained")
    axes = figure.subplots()
    axes.imshow(canvas, interpolation="nearest")
    middles = [row * (tile_height + 6) + tile_height / 2 for row in range(len(classes))]
    axes.set_yticks(middles, [synthetic.classes[label][:16] for label in classes], fontsize=9)
    axes.set_xticks([])
    right = axes.secondary_yaxis("right")
    right.set_yticks(middles, ends, fontsize=8, color="#666666")
    right.set_ylabel("least distance", fontsize=8, color="#666666")
    for side in (axes, right):
        side.tick_params(length=0)
        side.spines[:].set_visible(False)
    figure.suptitle(f"Synthetic images (blue) that come nearest to a training image (orange)\n{LOCAL}", fontsize=10)
    save(figure, path)


def framed(image: np.ndarray, scale: int, colour: tuple[int, int, int]) -> np.ndarray:
    """(H, W, C) uint8 magnified, in RGB, in a frame two pixels wide."""
    larger = np.broadcast_to(image, (*image.shape[:2], 3)).repeat(scale, axis=0).repeat(scale, axis=1)
    tile = np.empty((larger.shape[0] + 4, larger.shape[1] + 4, 3), dtype=np.uint8)
    tile[:] = colour
    tile[2:-2, 2:-2] = larger
    return tile


def plot_embedding(
    synthetic: ImageSet, real: ImageSet, features: np.ndarray, real_features: np.ndarray, path: Path, space: str, most: int = 1000
) -> None:
    """t-SNE of synthetic and real features together, at most `most` of each, drawn side by side on the same axes, by class."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE

    random = np.random.default_rng(0)
    chosen = [np.sort(random.permutation(len(rows))[:most]) for rows in (features, real_features)]
    together = np.concatenate([features[chosen[0]], real_features[chosen[1]]]).astype(np.float64)
    together = together / max(float(together.std()), 1e-12) + 1e-6 * random.normal(size=together.shape)  # equal points alone would crash it
    perplexity = min(30.0, max(1.0, (len(together) - 1) / 4))
    places = TSNE(perplexity=perplexity, init="pca" if together.shape[1] > 1 else "random", random_state=0).fit_transform(together)
    first = len(chosen[0])
    count = len(synthetic.classes)
    colours = colormaps["tab10" if count <= 10 else "tab20" if count <= 20 else "gist_rainbow"]
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    sides = (("real", places[first:], real.labels[chosen[1]]), ("synthetic", places[:first], synthetic.labels[chosen[0]]))
    for axes, (title, own, labels) in zip(panels, sides, strict=True):
        axes.scatter(*places.T, s=4, color="#e3e3e3", linewidths=0)  # the other set, as a ground
        for label in range(count):
            colour = colours(label if count <= 20 else label / count)
            axes.scatter(*own[labels == label].T, s=7, color=colour, linewidths=0, label=synthetic.classes[label][:16])
        axes.set_title(f"{title} ({len(own)})", fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_color("#cccccc")
    if count <= MOST_CLASSES:
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(count, 10), frameon=False, fontsize=8, markerscale=2.5, handletextpad=0.1)
    figure.suptitle(f"t-SNE of features in {space}, in colour by class, grey: the other set ({LOCAL})", fontsize=10)
    save(figure, path)


def save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None} if path.suffix == ".png" else None)
