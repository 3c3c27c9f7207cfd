"""Plot accuracy against minutes: the runs in `results/` and published ones, in one picture.

    python benchmarks/accuracy_minutes.py [docs/accuracy-minutes.png]

A point stands for all rows with the same recipe, ε and set. Its accuracy is the mean of these rows.
Its time is from the fastest row, and is for a complete run on two processor cores. All published
results are drawn at the training time of FETA-Pro, added up over its four GPUs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

HERE = Path(__file__).parent
SETS = {"digits": "digits, 8×8", "fashion-mnist-cpu": "Fashion-MNIST", "cifar10-cpu": "CIFAR-10"}
FILES = (
    *("evolution", "fashion-mnist", "fashion-mnist-teacher", "fashion-mnist-diffusion"),
    *("full-teacher", "gaussian", "mixed", "natural", "natural-papers", "recipes"),
)
# Value in the column `change` of a row -> text that the plot adds to the recipe's name
VARIANTS = {
    "teacher.feature=patches": ", patches",
    "auxiliary.steps=1800": ", longer fits",
    "classifier.steps=8000": ", longer public training",
    "synthesize.count=120000": ", 120 000 images",
    "synthesize.count=80000": ", 80 000 images",
}
# FETA-Pro took 11.7 hours on each of four GPUs; this is the sum. The other papers state no time, so
# their points are drawn at the same time
GPU_MINUTES = 4 * 11.7 * 60
# the colours of tab20 without its two greys
COLOURS = [plt.get_cmap("tab20")(index) for index in range(20) if index not in (14, 15)]
PUBLISHED = {  # accuracy at ε = 1 and 10, as in docs/papers.md
    "fashion-mnist-cpu": {
        "FETA-Pro": (83.4, 88.1),
        "DP-FETA": (81.7, 87.3),
        "DPDM": (76.4, 85.6),
        "DP-MERF": (62.2, 62.2),
    },
    "cifar10-cpu": {
        "FETA-Pro": (37.9, 47.0),
        "Dosser": (51.0, 61.1),
        "NDPDC": (42.6, 53.9),
        "PrivImage *": (74.5, 78.4),
        "RPGen *": (70.3, 73.4),
    },
}


def rows() -> pd.DataFrame:
    """Return one row per profile, recipe and epsilon (1 or 10), with accuracy and minutes."""
    tables = [pd.read_csv(HERE / "results" / f"{name}.csv") for name in FILES]
    found = pd.concat(
        [t.assign(accuracy=t["student"] if "student" in t else t["cnn"]) for t in tables]
    )
    for changed, name in VARIANTS.items():
        found.loc[found.change.fillna("").str.contains(changed, regex=False), "recipe"] += name
    # Rows measured before the recipe `full` had a teacher: today's recipe gives different numbers
    older = found.recipe.eq("full") & found.profile.eq("digits") & found["version"].isna()
    found = found[found.epsilon.isin([1, 10]) & ~older]
    means = {"accuracy": ("accuracy", "mean"), "minutes": ("minutes", "min")}
    return found.groupby(["profile", "recipe", "epsilon"], as_index=False).agg(**means)  # type: ignore[call-overload, no-any-return]


def spread(heights: list[float], least: float) -> list[float]:
    """Move heights down until neighbours are at least `least` apart. heights: the highest first."""
    found = list[float]()
    for height in heights:
        found.append(min(height, found[-1] - least) if found else height)
    return found


def draw(axes: plt.Axes, profile: str, table: pd.DataFrame) -> None:
    """Draw one line per recipe, from ε = 1 (hollow) to ε = 10 (filled), with its name at the right.

    Published results are grey.
    """
    points = dict[str, list[list[float]]]()
    for name, part in table.groupby("recipe"):
        points[str(name)] = part[["epsilon", "minutes", "accuracy"]].to_numpy(float).tolist()
    ours = list(points)
    for name, both in PUBLISHED.get(profile, {}).items():
        points[name] = [
            [epsilon, GPU_MINUTES, accuracy]
            for epsilon, accuracy in zip((1, 10), both, strict=True)
        ]
    points = dict(sorted(points.items(), key=lambda item: -item[1][-1][2]))
    every = [accuracy for part in points.values() for _, _, accuracy in part]
    heights = spread([part[-1][2] for part in points.values()], (max(every) - min(every)) / 20)
    axes.set(xscale="log", title=SETS[profile], xlabel="minutes")
    for (name, line), height in zip(points.items(), heights, strict=True):
        colour = COLOURS[ours.index(name)] if name in ours else "0.6"
        axes.plot([p[1] for p in line], [p[2] for p in line], color=colour, linewidth=1)
        for epsilon, minutes, accuracy in line:
            axes.plot(
                minutes,
                accuracy,
                "o",
                color=colour,
                markerfacecolor=colour if epsilon == 10 else "white",
            )
        _, minutes, accuracy = line[-1]
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.3}
        place: dict[str, Any] = {"textcoords": axes.get_yaxis_transform(), "va": "center"}
        axes.annotate(
            name,
            (minutes, accuracy),
            (1.03, height),
            color=colour,
            fontsize=8,
            arrowprops=arrow,
            **place,
        )
    axes.grid(alpha=0.25)


def main() -> None:
    table = rows()
    figure, axes = plt.subplots(1, 3, figsize=(16, 5.6), constrained_layout=True)
    for place, profile in zip(axes, SETS, strict=True):
        draw(place, profile, table[table.profile == profile])
    axes[0].set_ylabel("accuracy of a network trained on the release, %")
    figure.suptitle(
        "ε = 1 hollow, ε = 10 filled. Colours: this project, on two processor cores. Grey: "
        "published results, all placed at the training time of FETA-Pro (11.7 hours on four "
        "GPUs), because the other papers state no time. * uses public photographs",
        fontsize=9,
    )
    figure.savefig(
        sys.argv[1] if len(sys.argv) > 1 else HERE.parent / "docs" / "accuracy-minutes.png", dpi=100
    )


if __name__ == "__main__":
    main()
