"""`stage plan`: resolve every parameter, calibrate the noise, show the budget."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfumato.settings.stages import STAGES
from stages.runner import memory_line
from stages.screen import delta_text, say, show_numbers, tell
from stages.state import state_dir

if TYPE_CHECKING:
    from sfumato.planning.kept import Plan
    from sfumato.planning.make import ProjectPlan
    from sfumato.privacy.decision import Decision
    from sfumato.settings.params import Params

ParamsPath = Annotated[Path, typer.Option("--params", help="Parameter file.")]


def plan(
    params: ParamsPath = Path("params.yaml"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be spent; write nothing.")
    ] = False,
) -> None:
    """[free] Resolve all parameters, write one configuration file per stage, and show the privacy
    budget.
    """
    from sfumato.planning.folder import resolve_project
    from sfumato.planning.make import next_lines, risk_line, share_lines
    from sfumato.settings.recipes import read_layer

    see = say if sys.stderr.isatty() else None
    project_plan = resolve_project(Path(), state_dir(), params, dry_run=dry_run, say=say, see=see)
    show_budget(project_plan)
    if dry_run and not project_plan.inherited:
        tell(risk_line(project_plan))
    say(*share_lines(project_plan, read_layer(params), params), *project_plan.remarks())
    spending, pending_stages = project_plan.spending()
    if dry_run:
        show_run(project_plan, spending, pending_stages)
    project_plan.check_lifetime(spending)
    if dry_run:
        tell(*next_lines(project_plan, spending))
        if not Path("dvc.yaml").exists():
            tell("`stage run` needs dvc.yaml: copy it from a project that `stage init` made")
    else:
        project_plan.write()


def show_run(
    project_plan: ProjectPlan, spending: Sequence[Decision], pending_stages: set[str]
) -> None:
    """Show what the next run would spend, and the memory and minutes it needs."""
    from sfumato.planning.make import final_settings_lines, spending_lines

    tell(*spending_lines(project_plan, spending))
    say(*final_settings_lines(project_plan.params))
    for name in project_plan.mechanisms:
        if STAGES[name].network:
            file = project_plan.files[name]
            sizes = (
                tuple(file["shape"]),
                len(file["classes"]),
                getattr(project_plan.params, name),
                file["size_hint"],
            )
            tell(f"{name}: memory {memory_line(project_plan.params.model, *sizes)}")
    for name in project_plan.mechanisms:
        tell(*STAGES[name].remarks(project_plan))
    runs = {"plan", *pending_stages, *project_plan.unprepared}
    if pending_stages:
        runs |= {"ledger", "report"}
    show_minutes(
        project_plan.params,
        {name: value for name, value in project_plan.seconds().items() if name in runs},
    )


def show_budget(project_plan: Plan) -> None:
    """Show each query with its mechanism, epsilon and share of the budget, then the total and the
    target.
    """
    budget = project_plan.budget
    title = f"{budget['recipe']}: privacy budget at δ = {delta_text(budget['delta'])}"
    headings = ("stage", "σ", "sample rate", "releases", "ε alone", "share of budget")
    rows = []
    for name, row in budget["stages"].items():
        noise = f"{row['noise_multiplier']:g}", f"{row['sample_rate']:.4g}", str(row["uses"])
        rows.append((name, *noise, f"{row['epsilon']:.3f}", f"{row['share']:.1%}"))
    total = ("together", "", "", "", f"{budget['epsilon']:.3f}", f"target {budget['target']:g}")
    show_numbers(title, headings, rows, total=total)


def show_minutes(params: Params, seconds: Mapping[str, float | None]) -> None:
    """Show the expected minutes of each stage that runs, of everything else, and in total.

    seconds: expected seconds by name, None if they are unknown.
    """
    rows = []
    other_seconds = 0.0
    for name, value in seconds.items():
        if name in STAGES and params.runs(name):
            rows.append((name, "unknown" if value is None else f"{value / 60:.1f}"))
        else:
            other_seconds += value or 0.0
    rows.append(("all others", f"{other_seconds / 60:.1f}"))
    together = sum(value or 0.0 for value in seconds.values()) / 60
    show_numbers(
        "minutes on an idle machine",
        ("stage", "expected"),
        rows,
        total=("together", f"{together:.1f}"),
    )
    load = os.getloadavg()[0]
    processors = os.cpu_count() or 1
    if load > 0.5 * processors:
        tell(
            f"other programs are running (load {load:.1f} on {processors} processors), so the run "
            "may take longer"
        )
