"""Which public images the warm-up sees: classes ranked by their noisy votes, and what their images are labelled as.

Everything here is free: it reads the released histogram and public images. So the ratio may be tuned afterwards (RPGen stage 1, PrivImage).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sfumato.config import Select
from sfumato.data.images import ImageSet, to_grid
from sfumato.errors import ConfigError

SHOWN, EXAMPLES, TALLEST = 60, 6, 20  # of the picture: classes, images of each, classes in a column
CELL = 0.42  # inches: the height of a class in the picture
DARK, LIGHT, PALE = "#253d5b", "#5c7f9c", "#c9d4db"


class Kept(NamedTuple):
    public: int  # public class
    row: int  # row of the histogram that chose it: a sensitive class, or 0
    votes: float  # noisy; NaN where there is no histogram


def number_to_keep(settings: Select, public_classes: int) -> int:
    """`select.count`, or the ratio's part of the public classes, at least one. Raises ConfigError where the count exceeds them."""
    if settings.count is None:
        return max(1, round(settings.ratio * public_classes))
    if settings.count > public_classes:
        raise ConfigError(
            f"select.count={settings.count} exceeds the {public_classes} public classes: lower it, or take a larger public set"
        )
    return settings.count


def select_classes(histogram: np.ndarray, keep: int) -> list[Kept]:
    """The `keep` public classes with the most votes, most voted first; equal ones in the order of rows, then of classes.

    histogram: (R, P) noisy votes. One row: the top `keep` (RPGen). A row for each sensitive class (PrivImage): the pairs of a row and a
    class are gone through from the most voted down, a class goes to the first row that asks for it, and a row stops at its share: each
    has ⌊keep/R⌋ or ⌈keep/R⌉ classes in the end, none in common.
    Raises ConfigError where `keep` classes cannot be had, or are fewer than the rows.
    """
    rows, public_classes = histogram.shape
    if public_classes < rows:
        raise ConfigError(
            f"{public_classes} public classes cannot serve {rows} sensitive classes without overlap: take a public set with more classes, "
            "or set histogram.per_class: false"
        )
    if keep < rows:
        raise ConfigError(
            f"select keeps {keep} of {public_classes} public classes, too few for {rows} sensitive ones: set select.count to {rows} or more"
        )
    if keep > public_classes:
        raise ConfigError(f"select keeps {keep} public classes but there are {public_classes}: lower select.count")
    share, extra = divmod(keep, rows)
    taken, held, kept = np.zeros(public_classes, dtype=bool), np.zeros(rows, dtype=np.int64), []
    for pair in np.argsort(-histogram, axis=None, kind="stable"):
        row, public = divmod(int(pair), public_classes)
        if taken[public] or held[row] > share or (held[row] == share and not extra):
            continue
        extra -= int(held[row] == share)
        taken[public], held[row] = True, held[row] + 1
        kept.append(Kept(public, row, float(histogram[row, public])))
        if len(kept) == keep:
            break
    return kept


def select_all(public_classes: int, keep: int) -> list[Kept]:
    """Every public class, in order: what is left without a histogram. Raises ConfigError where fewer were asked for."""
    if keep != public_classes:
        raise ConfigError(
            f"select keeps {keep} of {public_classes} public classes, but no histogram says which: set histogram.enabled: true, or select.ratio: 1"
        )
    return [Kept(public, 0, math.nan) for public in range(public_classes)]


def relabel(
    labels: np.ndarray, kept: Sequence[Kept], public_classes: int, per_class: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The public images to keep and their new labels: int64 indices, ascending, and int64 labels of the same length.

    labels: (N,) int64 below `public_classes`. per_class: an image takes the sensitive class that chose its class (PrivImage); else the
    kept classes are numbered 0, 1, … in the order of `kept`. Memory: a few numbers an image; no image is read.
    """
    new = np.full(public_classes, -1, dtype=np.int64)
    for rank, choice in enumerate(kept):
        new[choice.public] = choice.row if per_class else rank
    every = new[labels]
    indices = np.flatnonzero(every >= 0)
    return indices.astype(np.int64), every[indices]


def selection_rows(kept: Sequence[Kept], public: Sequence[str], sensitive: Sequence[str] | None) -> list[list[str]]:
    """The table of the selection, its header first. sensitive: names of the sensitive classes where the images are relabelled to them."""
    table = [["public_class", "noisy_count", "rank", "relabelled_as"]]
    for rank, choice in enumerate(kept, start=1):
        votes = "" if math.isnan(choice.votes) else f"{choice.votes:.2f}"
        table.append(
            [public[choice.public], votes, str(rank), sensitive[choice.row] if sensitive else public[choice.public]]
        )
    return table


def plot_selection(
    path: Path, images: ImageSet, kept: Sequence[Kept], histogram: np.ndarray | None, sensitive: Sequence[str] | None
) -> None:
    """Draw examples of each kept class beside its noisy votes, SHOWN classes at most; above, where the line was drawn among all classes.

    images: the public set, of which EXAMPLES images of each class shown are read; histogram: (R, P), or None; sensitive: names of the
    sensitive classes where the images are relabelled to them: classes are then grouped by it.
    """
    from matplotlib.figure import Figure  # heavy: only when used

    shown = list(kept[:SHOWN])
    if sensitive:
        shown.sort(key=lambda choice: choice.row)  # stable: by rank inside
    names = [
        short(images.classes[choice.public]) + (f" → {short(sensitive[choice.row])}" if sensitive else "")
        for choice in shown
    ]
    votes = [choice.votes for choice in shown]
    counted = histogram is not None
    low, high = min([0.0, *votes]), max([1.0, *votes])
    limits = (low - 0.25 * (high - low) * (low < 0), high + 0.3 * (high - low))  # room for the numbers
    columns = -(-len(shown) // TALLEST)
    tallest = -(-len(shown) // columns)
    label, strip, bar = (
        0.15 + 0.075 * max(map(len, names)),
        CELL * EXAMPLES * images.shape[2] / images.shape[1],
        1.9 if counted else 0.2,
    )
    above = 0.4 + (1.6 if counted and not sensitive else 0.0)
    across, down = max(columns * (label + strip + bar), 4.0), above + CELL * tallest + 0.1
    figure = Figure(figsize=(across, down))

    def place(left: float, top: float, width: float, height: float):
        return figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))

    title = f"{len(kept)} of {len(images.classes)} public classes kept" + (
        f", {len(shown)} shown" if len(shown) < len(kept) else ""
    )
    figure.text(0.5, 1 - 0.22 / down, title, ha="center", va="center", fontsize=11)
    if histogram is not None and not sensitive:
        draw_all_votes(place(0.7, 0.45, across - 0.9, 1.15), histogram[0], {choice.public for choice in kept})
    tones = {row: (DARK, LIGHT)[i % 2] for i, row in enumerate(sorted({choice.row for choice in shown}))}
    for column in range(columns):
        part = slice(column * tallest, min((column + 1) * tallest, len(shown)))
        count, left = part.stop - part.start, column * (label + strip + bar) + label
        rows = np.arange(count) + 0.5
        pictures = place(left, above, strip, CELL * count)
        grid = example_grid(images, shown[part])
        pictures.imshow(
            grid if grid.shape[2] == 3 else grid[..., 0],
            cmap="gray",
            vmin=0,
            vmax=255,
            aspect="auto",
            extent=(0, EXAMPLES, count, 0),
        )
        pictures.set_yticks(rows, names[part], fontsize=8)
        pictures.set_xticks([])
        pictures.tick_params(length=0)
        pictures.spines[:].set_visible(False)
        if counted:
            bars = place(left + strip + 0.15, above, bar - 0.35, CELL * count)
            drawn = bars.barh(rows, votes[part], 0.55, color=[tones[choice.row] for choice in shown[part]])
            bars.bar_label(drawn, [str(round(value)) for value in votes[part]], padding=3, fontsize=8)
            bars.axvline(0, color="#444444", linewidth=0.8)
            bars.set_xlim(limits)
            bars.set_ylim(count, 0)
            bars.set_axis_off()
    figure.savefig(path, dpi=130, metadata={"Software": None} if path.suffix == ".png" else None)


def draw_all_votes(axes, votes: np.ndarray, kept: set[int]) -> None:
    """All public classes by noisy votes, the kept ones dark."""
    order = np.argsort(-votes, kind="stable")
    axes.bar(range(len(order)), votes[order], 0.85, color=[DARK if int(public) in kept else PALE for public in order])
    axes.axhline(0, color="#444444", linewidth=0.8)
    axes.set_xlim(-1, len(order))
    axes.set_xlabel("public classes, most voted first (dark: kept)", fontsize=8)
    axes.set_ylabel("noisy votes", fontsize=8)
    axes.set_xticks([])
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def example_grid(images: ImageSet, shown: Sequence[Kept]) -> np.ndarray:
    """One row of examples for each class shown, white where it has fewer than EXAMPLES: (H', W', C) uint8."""
    channels, height, width = images.shape
    cells = np.full((len(shown) * EXAMPLES, height, width, channels), 255, dtype=np.uint8)
    for place, choice in enumerate(shown):
        members = np.flatnonzero(images.labels == choice.public)
        some = members[np.linspace(0, len(members) - 1, min(EXAMPLES, len(members))).astype(np.int64)]
        cells[place * EXAMPLES : place * EXAMPLES + len(some)] = images.images[some]
    return to_grid(cells.transpose(0, 3, 1, 2) / np.float32(255), EXAMPLES)


def short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
