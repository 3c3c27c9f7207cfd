"""The style of the axes in the benchmarks' plots."""

from collections.abc import Mapping
from typing import Any

LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 8}


def log_ticks(axes, ticks: Mapping[float, str]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()


def on_a_grid(axes, lines: str) -> None:
    """Draw pale grid lines behind the plot. lines: the axes to draw them for, "y" or "both"."""
    axes.grid(axis=lines, color="#e8e8e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
