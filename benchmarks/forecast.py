"""Fit the forecast of `stage init` to runs on public sets, plot it, and forecast left-out sets.

    # writes sfumato/planning/forecast.yaml and docs/forecast.png, prints a table
    python benchmarks/forecast.py

`results/usefulness.csv` has one row per run: the kind of images (`grey`, `colour`, or `chosen` for
photographs chosen among public ones), the number of units (sensitive images, or persons), and the
balanced accuracy in % of the best classifier trained on the release and of the best one trained on
real images. If no classifier was trained on real images, 100 is used. `results/sizes.csv` has the
same columns by image size, from `by_size.py`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import yaml
from scipy.special import expit, logit

from sfumato.evaluation.verdict import VERDICT_LEVELS, level_of
from sfumato.planning.forecast import range_width

HERE = Path(__file__).parent
FITTED = HERE.parent / "sfumato" / "planning" / "forecast.yaml"
HEADER = (
    "# Written by `python benchmarks/forecast.py` from two tables of benchmarks/results: public "
    "sets only.\n"
)
HEADER += (
    "# product: number of images or persons, times ε.\n"
    "# learned: balanced accuracy above chance after training on the release, divided by the same "
    "after training on real\n"
    "#   images. `brain MRI of 500` is a part of the set `brain MRI`, with 500 images. In `digits "
    "of patients`, each digit has\n"
    "#   an invented patient, and patients are protected.\n"
)
COVERED = 7 / 8  # At least this share of the results of left-out sets must lie in the range
# Smallest and largest number of units of a small set. For at least the share COVERED of the small
# sets, all results must lie in the range
SMALL = (100, 2000)
COLOURS = {"grey": "tab:blue", "colour": "tab:orange", "chosen": "tab:green"}
NAMES = {
    "grey": "grey images",
    "colour": "colour images",
    "chosen": "photographs chosen among public ones",
}


def runs() -> pd.DataFrame:
    """Read the runs. Adds the column `product`, and computes `learned` where it is missing.

    HEADER defines both columns.
    """
    table = pd.read_csv(HERE / "results" / "usefulness.csv")
    chance = 100 / table.classes
    learned = (table.release - chance) / (table.real.fillna(100) - chance)
    return table.assign(product=table.units * table.epsilon, learned=table.learned.fillna(learned))


def line_of(table: pd.DataFrame) -> dict[str, Any]:
    """Fit lines by least squares on the logit scale: one offset per kind, and a common slope."""
    kinds = [kind for kind in NAMES if (table.kind == kind).any()]
    columns = np.column_stack(
        [*(table.kind == kind for kind in kinds), np.log10(table["product"])]
    ).astype(float)
    heights = logit(table.learned.to_numpy())
    (*offsets, slope), *_ = np.linalg.lstsq(columns, heights)
    rounded = {kind: round(float(value), 2) for kind, value in zip(kinds, offsets, strict=True)}
    return {"offsets": rounded, "slope": round(float(slope), 2)}


def height_at(line: dict[str, Any], kind: str, product: Any) -> Any:
    return line["offsets"][kind] + line["slope"] * np.log10(product)


def left_out(table: pd.DataFrame) -> pd.DataFrame:
    """Forecast each run by a line that is fitted to the other sets.

    Sets of the same pictures as the run's set, such as a part of it, are left out too. A run is
    omitted if no set of its kind remains.
    """
    rows = []
    # Sets of the same pictures, such as "brain MRI" and "brain MRI of 500", are left out together
    pictures = np.array([str(name).split(" of ")[0] for name in table.set])
    for picture, run in zip(pictures, table.itertuples(), strict=True):
        line = line_of(table[pictures != picture])
        if run.kind in line["offsets"]:
            about = {
                "set": run.set,
                "units": run.units,
                "epsilon": run.epsilon,
                "learned": run.learned,
            }
            rows.append({**about, "height": height_at(line, str(run.kind), run.product)})
    found = pd.DataFrame(rows)
    error = (found.height - logit(found.learned)).abs() / found.units.map(range_width)
    forecast = expit(found.height)
    levels = {"expected": map(level_of, forecast), "level": map(level_of, found.learned)}
    return found.assign(
        error=error, forecast=forecast, **{name: list(level) for name, level in levels.items()}
    )


def fitted(table: pd.DataFrame) -> dict[str, Any]:
    """Fit the line and its `spread`, and list the runs.

    The spread is chosen by the errors of the forecasts of `left_out`, on the logit scale. The limit
    of an error is the spread times `range_width`, which exceeds 1 if there are few units. At least
    the share COVERED of all errors is within this limit. In at least the same share of the small
    sets, all errors are within it.
    """
    found = left_out(table)
    small = found[found.units.between(*SMALL)].groupby("set").error.max()
    rows = zip(table.set, table.epsilon, table.kind, table["product"], table.learned, strict=True)
    runs = [
        {
            "name": f"{name}, ε = {epsilon:g}",
            "kind": kind,
            "product": float(product),
            "learned": round(float(part), 3),
        }
        for name, epsilon, kind, product, part in rows
    ]
    width = max(error.quantile(COVERED, interpolation="higher") for error in (found.error, small))
    spread = math.ceil(100 * width) / 100
    return line_of(table) | {"spread": spread, "sizes": power_of_size(), "runs": runs}


def power_of_size() -> dict[str, float]:
    """Fit `learned` as (side / largest)^(offset + slope · log10(units · ε)).

    `learned` is the gain of a release over chance, divided by the largest gain that real images of
    the same set give at any size. `largest` is the largest measured side; the forecast treats
    larger images as images of that size. The fit is by least squares of logarithms. Each
    combination of set, number of units and ε has its own constant, so a combination need not be
    measured at every size. Runs are weighted by `learned`, because the logarithm of a small value
    is mostly noise.
    """
    table = pd.read_csv(HERE / "results" / "sizes.csv")
    chance = 100 / table.classes
    real = table.groupby("set").real.transform("max")
    learned = ((table.release - chance) / (real - chance)).clip(lower=0.01)
    side = np.log(table["size"])
    groups = pd.get_dummies(table.groupby(["set", "units", "epsilon"]).ngroup()).to_numpy(float)
    columns = np.column_stack([side, side * np.log10(table.units * table.epsilon), groups])
    weights = learned.to_numpy()
    (offset, slope, *_), *_ = np.linalg.lstsq(columns * weights[:, None], np.log(weights) * weights)
    return {
        "offset": round(float(offset), 3),
        "slope": round(float(slope), 3),
        "largest": int(table["size"].max()),
    }


def draw(table: pd.DataFrame, line: dict[str, Any]) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.6), constrained_layout=True)
    products = np.geomspace(30, 3e6, 200)
    for kind, part in table.groupby("kind"):
        axes.plot(
            products,
            100 * expit(height_at(line, str(kind), products)),
            color=COLOURS[str(kind)],
            label=NAMES[str(kind)],
        )
        axes.plot(part["product"], 100 * part.learned, "o", color=COLOURS[str(kind)])
    low, high = (
        100 * expit(height_at(line, "grey", products) + sure * line["spread"]) for sure in (-1, 1)
    )
    axes.fill_between(products, low, high, color=COLOURS["grey"], alpha=0.12, linewidth=0)
    for name, epsilon, product, learned in (
        table[["set", "epsilon", "product", "learned"]].to_numpy().tolist()
    ):
        small = " of " in name  # a part of another set; its name is written to the left
        axes.annotate(
            f"{name}, ε = {epsilon:g}",
            (product, 100 * learned),
            (-5 if small else 5, -7),
            textcoords="offset points",
            ha="right" if small else "left",
            fontsize=6,
        )
    for level, (least, _) in list(VERDICT_LEVELS.items())[:-1]:
        axes.axhline(100 * least, color="0.7", linewidth=0.7)
        axes.text(31, 100 * least + 1, level, color="0.4", fontsize=8)
    axes.set(xscale="log", ylim=(0, 101), xlim=(30, 3e6))
    axes.set(xlabel="images (or persons) × ε", ylabel="learned, % of what there is to learn")
    axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.15))
    figure.savefig(HERE.parent / "docs" / "forecast.png", dpi=110)


def main() -> None:
    table = runs()
    line = fitted(table)
    text = yaml.safe_dump(
        line, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120
    )
    FITTED.write_text(HEADER + text, encoding="utf-8")
    draw(table, line)
    print({name: value for name, value in line.items() if name != "runs"})
    print(left_out(table).drop(columns="height").round(2).to_string(index=False))


if __name__ == "__main__":
    main()
