"""Show the results of the audit: as CSV, as tables for the screen, and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from axes import on_a_grid
from csv_tables import csv_of
from rich.table import Table

from audit.canaries import OneRun
from audit.repeated import Verdict
from sfumato.evaluation.plots import new_figure, save


def verdict_of(row: Verdict) -> str:
    if row.planted:
        return "planted, found" if row.alarm else "PLANTED, NOT FOUND"
    return "REFUTED" if row.alarm else "holds"


def verdicts_csv(rows: Sequence[Verdict]) -> str:
    table = pd.DataFrame([{**vars(row), "verdict": verdict_of(row)} for row in rows])
    return csv_of(table.drop(columns="planted"))


def runs_csv(rows: Sequence[OneRun]) -> str:
    return csv_of(pd.DataFrame(map(vars, rows)))


def verdict_table(rows: Sequence[Verdict], confidence: float) -> Table:
    title = (
        f"{rows[0].runs} releases with one generated image and {rows[0].runs} without it "
        f"(confidence {confidence:.1%})"
    )
    table = Table(
        "release",
        "claimed μ",
        "μ at least",
        "μ at most, by this test",
        "μ at least, from odd or even only",
        "releases off the grid",
        "",
        title=title,
    )
    for row in rows:
        numbers = (
            f"{row.mu:g}",
            f"{row.low:.3f}",
            f"{row.high:.3f}",
            f"{row.low_bits:.3f}",
            str(row.off_grid),
        )
        table.add_row(row.name, *numbers, verdict_of(row))
    return table


def run_table(rows: Sequence[OneRun]) -> Table:
    title = (
        f"One run of DP-SGD with {rows[0].canaries} canaries (confidence {rows[0].confidence:.0%})"
    )
    columns = (
        "claimed ε",
        "exact ε",
        "ε at least",
        "by (ε, δ) only",
        "by the curve",
        "guesses right",
        "σ",
        "",
    )
    table = Table(*columns, title=title)
    for row in rows:
        proven = [f"{value:.3f}" for value in (row.exact, row.low, row.low_pair, row.low_curve)]
        numbers = (
            f"{row.epsilon:g}",
            *proven,
            f"{100 * row.right:.1f} %",
            f"{row.noise_multiplier:g}",
        )
        table.add_row(*numbers, "REFUTED" if row.alarm else "holds")
    return table


def plot_verdicts(rows: Sequence[Verdict], path: Path) -> None:
    """Plot the measured bounds of each release as a bar, and the claimed value as a line."""
    figure = new_figure(7.0, 0.6 + 0.32 * len(rows))
    axes = figure.subplots()
    top = 1.15 * max(max(row.low, row.mu) for row in rows)
    for place, row in enumerate(reversed(rows)):
        colour = "#e07a1f" if row.planted else "#253d5b"
        axes.plot(
            [row.low, min(row.high, top)],
            [place, place],
            color=colour,
            linewidth=5,
            solid_capstyle="butt",
        )
    axes.axvline(rows[0].mu, color="black", linewidth=1, linestyle=":")
    axes.set_yticks(range(len(rows)), [row.name for row in reversed(rows)])
    axes.set(xlim=(0, top), xlabel="μ: claimed (dotted), measured (bars); orange: planted bugs")
    on_a_grid(axes, "both")
    save(figure, path)
