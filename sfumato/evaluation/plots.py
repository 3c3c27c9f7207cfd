"""Pictures of an evaluation. All of them show real images or are computed from them: local, never part of a release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sfumato.data.images import ImageSet
from sfumato.evaluation.cache import features_of
from sfumato.evaluation.extractors import Extractor
from sfumato.evaluation.metrics.neighbours import nearest
from sfumato.evaluation.scores import SEARCHED, some

LOCAL = "local: not for release"
SYNTHETIC, REAL = (37, 99, 168), (224, 122, 31)  # the frames of the images, and their names in the title
MOST_CLASSES = 20


def accuracies(values: dict) -> dict[str, dict]:
    """The entries of the classifiers among the metrics of one set."""
    return {name: row for name, row in values.items() if "mean" in row}


def plot_accuracy(metrics: dict, path: Path) -> None:
    """Draw the accuracies of `evaluate_release`: a group per set, a bar per classifier, ± one standard deviation."""
    from matplotlib.figure import Figure  # heavy: only when used

    sets = [name for name, values in metrics.items() if isinstance(values, dict) and accuracies(values)]
    classifiers = list(accuracies(metrics[sets[0]]))
    width, colours = 0.8 / len(classifiers), ("#9db4c0", "#5c7f9c", "#253d5b", "#f0c08a", "#e07a1f", "#9a4d0c")
    figure = Figure(figsize=(max(5.0, 1.2 + 0.65 * len(classifiers) * len(sets)), 3.6), layout="constrained")
    axes = figure.subplots()
    for i, classifier in enumerate(classifiers):
        places = np.arange(len(sets)) + (i - (len(classifiers) - 1) / 2) * width
        heights, spread = ([100 * metrics[name][classifier][key] for name in sets] for key in ("mean", "std"))
        bars = axes.bar(
            places,
            heights,
            width * 0.92,
            yerr=spread,
            capsize=3,
            label=classifier,
            color=colours[i % 6],
            ecolor="#444444",
        )
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    axes.set_xticks(range(len(sets)), sets)
    axes.set_ylim(0, 110)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("accuracy on real hold-out, %")
    axes.set_title(f"Classifiers by what they were trained on ({LOCAL})", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(classifiers), frameon=False)
    save(figure, path)


def plot_comparison(rows: Sequence[Mapping], classifier: str, path: Path) -> None:
    """Accuracy of one classifier against ε, one line per recipe.

    A point is the mean of the runs at one target, ± their standard deviation; for a single run, that over its seeds.
    rows: from `sfumato.evaluation.comparison.comparison_rows`; those without that accuracy are left out. A run that is
    marked as not comparable is drawn hollow, apart from the lines.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.get(classifier) is not None]
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = figure.subplots()
    hollow = False
    for i, recipe in enumerate(recipes):
        colour, marker = colormaps["tab10" if len(recipes) <= 10 else "tab20"](i % 20), "osD^vP*X"[i % 8]
        own = [row for row in rows if row["recipe"] == recipe]
        groups: dict[float, list[Mapping]] = {}
        for row in own:
            if row["differs"]:
                hollow = True
                axes.errorbar(
                    row["epsilon"],
                    100 * row[classifier],
                    marker=marker,
                    color=colour,
                    markerfacecolor="white",
                    linestyle="none",
                    markersize=7,
                )
            else:
                groups.setdefault(row["target"], []).append(row)
        points = []
        for target in sorted(groups):
            values = [100 * row[classifier] for row in groups[target]]
            spread = (
                float(np.std(values, ddof=1))
                if len(values) > 1
                else 100 * (groups[target][0].get(f"{classifier}_std") or 0.0)
            )
            points.append((float(np.mean([row["epsilon"] for row in groups[target]])), float(np.mean(values)), spread))
        places, heights, spreads = (list(values) for values in zip(*points, strict=True)) if points else ([], [], [])
        axes.errorbar(
            places,
            heights,
            yerr=spreads,
            marker=marker,
            color=colour,
            capsize=3,
            linewidth=1.3,
            markersize=6,
            label=recipe,
        )
    axes.set_xscale("log")
    ticks = sorted({round(row["target"], 6) for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("ε, log scale")
    axes.set_ylabel(f"accuracy of {classifier} on real hold-out, %")
    axes.grid(axis="y", color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"Accuracy against privacy, by recipe ({LOCAL})", fontsize=10)
    figure.legend(
        loc="outside right upper",
        frameon=False,
        fontsize=8,
        title="hollow: not comparable" if hollow else None,
        title_fontsize=8,
    )
    save(figure, path)


def plot_protocol(found: Mapping, path: Path) -> None:
    """Draw what `stage utility` measured.

    Panels: accuracy against the number of images, with ensembles; real against synthetic scores of a grid of settings.
    """
    from matplotlib.figure import Figure

    panels = [name for name in ("sizes", "selection") if found.get(name)]
    figure = Figure(figsize=(5.2 * len(panels), 4.2), layout="constrained")
    colours = ("#253d5b", "#e07a1f", "#5c9e6b", "#9b59b6", "#9db4c0", "#c0392b")
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        if panel == "sizes":
            for i, (name, rows) in enumerate(found["sizes"].items()):
                counts, means, spreads = ([row[key] for row in rows] for key in ("images", "mean", "std"))
                axes.errorbar(
                    counts,
                    [100 * v for v in means],
                    yerr=[100 * v for v in spreads],
                    marker="o",
                    capsize=3,
                    color=colours[i % 6],
                    label=name,
                )
                ensemble = found.get("ensemble", {}).get(name)
                if ensemble:
                    label = f"{name}, ensemble of {ensemble['members']}"
                    axes.plot(
                        ensemble["images"],
                        100 * ensemble["accuracy"],
                        marker="*",
                        markersize=12,
                        linestyle="none",
                        color=colours[i % 6],
                        label=label,
                    )
            axes.set_xscale("log")
            ticks = sorted({row["images"] for rows in found["sizes"].values() for row in rows})
            axes.set_xticks(ticks, [f"{tick / 1000:g} K" if tick >= 1000 else str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.set_xlabel("synthetic images, log scale")
            axes.set_ylabel("accuracy on real hold-out, %")
            axes.set_title("Accuracy against the number of images", fontsize=10)
        else:
            settings = found["selection"]["settings"]
            for i, name in enumerate(dict.fromkeys(row["classifier"] for row in settings)):
                own = [row for row in settings if row["classifier"] == name]
                axes.scatter(
                    [100 * row["synthetic"] for row in own],
                    [100 * row["real"] for row in own],
                    color=colours[i % 6],
                    s=28,
                    label=name,
                )
            axes.set_xlabel("accuracy on synthetic images kept apart, %")
            axes.set_ylabel("accuracy on real hold-out, %")
            axes.set_title(f"Model selection: rank correlation {found['selection']['spearman']:.2f}", fontsize=10)
        axes.legend(frameon=False, fontsize=8)
        axes.grid(color="#ececec", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(LOCAL, fontsize=9, color="#666666")
    save(figure, path)


def plot_neighbours(
    synthetic: ImageSet, train: ImageSet, features: np.ndarray, train_features: np.ndarray, path: Path, pairs: int = 6
) -> None:
    """For each class, the synthetic images that come nearest to any training image, each beside that one.

    features, train_features: (N, D) and (M, D), a row for each image of the two sets. If anything was copied, this
    picture shows it. The first MOST_CLASSES classes are shown.
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
            canvas[top : top + tile_height, left + tile_width : left + 2 * tile_width] = framed(
                train.images[index[i]], scale, REAL
            )
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


def plot_features(extractor: Extractor, release: ImageSet, train: ImageSet, cache: Path, out: Path) -> None:
    """Draw what lies nearest to some released images, and both sets in the plane, into `out`. cache: of features."""
    shown, searched = some(release), some(train, SEARCHED)
    features, real = features_of(extractor, shown.images, cache), features_of(extractor, searched.images, cache)
    plot_neighbours(shown, searched, features, real, out / "neighbours.png")
    plot_embedding(shown, searched, features, real, out / "embedding.png", extractor.name)


def framed(image: np.ndarray, scale: int, colour: tuple[int, int, int]) -> np.ndarray:
    """(H, W, C) uint8 magnified, in RGB, in a frame two pixels wide."""
    larger = np.broadcast_to(image, (*image.shape[:2], 3)).repeat(scale, axis=0).repeat(scale, axis=1)
    tile = np.empty((larger.shape[0] + 4, larger.shape[1] + 4, 3), dtype=np.uint8)
    tile[:] = colour
    tile[2:-2, 2:-2] = larger
    return tile


def plot_embedding(
    synthetic: ImageSet,
    real: ImageSet,
    features: np.ndarray,
    real_features: np.ndarray,
    path: Path,
    space: str,
    most: int = 1000,
) -> None:
    """t-SNE of synthetic and real features together, at most `most` of each, side by side and coloured by class."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE

    random = np.random.default_rng(0)
    chosen = [np.sort(random.permutation(len(rows))[:most]) for rows in (features, real_features)]
    together = np.concatenate([features[chosen[0]], real_features[chosen[1]]]).astype(np.float64)
    # The jitter keeps points apart: t-SNE crashes where all are equal.
    together = together / max(float(together.std()), 1e-12) + 1e-6 * random.normal(size=together.shape)
    perplexity = min(30.0, max(1.0, (len(together) - 1) / 4))
    places = TSNE(
        perplexity=perplexity, init="pca" if together.shape[1] > 1 else "random", random_state=0
    ).fit_transform(together)
    first = len(chosen[0])
    count = len(synthetic.classes)
    colours = colormaps["tab10" if count <= 10 else "tab20" if count <= 20 else "gist_rainbow"]
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    sides = (
        ("real", places[first:], real.labels[chosen[1]]),
        ("synthetic", places[:first], synthetic.labels[chosen[0]]),
    )
    for axes, (title, own, labels) in zip(panels, sides, strict=True):
        axes.scatter(*places.T, s=4, color="#e3e3e3", linewidths=0)  # both sets in grey, as a background
        for label in range(count):
            colour = colours(label if count <= 20 else label / count)
            axes.scatter(*own[labels == label].T, s=7, color=colour, linewidths=0, label=synthetic.classes[label][:16])
        axes.set_title(f"{title} ({len(own)})", fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_color("#cccccc")
    if count <= MOST_CLASSES:
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(
            handles,
            names,
            loc="outside lower center",
            ncols=min(count, 10),
            frameon=False,
            fontsize=8,
            markerscale=2.5,
            handletextpad=0.1,
        )
    figure.suptitle(f"t-SNE of features in {space}, in colour by class, grey: the other set ({LOCAL})", fontsize=10)
    save(figure, path)


def save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None} if path.suffix == ".png" else None)
