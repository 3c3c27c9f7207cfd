"""The audit laboratory: attack queries and DP-SGD, on generated images, through the real charge.

    OMP_NUM_THREADS=1 python benchmarks/audit/run.py [--parts repeated,run] [--runs 10000]
        [--only count] [--out DIR]

`repeated` tries to distinguish releases with one image from releases without it; `run` guesses
which canaries were in one run of DP-SGD. The exit code is 3 if a claim is refuted or a planted bug
is not found.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # parent of the package `audit`

from audit import repeated as audits
from audit.canaries import one_run
from audit.subjects import planted, subjects
from audit.tables import plot_verdicts, run_table, runs_csv, verdict_of, verdict_table, verdicts_csv
from sfumato.runtime.compute import keep_freed_memory
from sfumato.storage.files import replace_file
from stages.screen import progress, table_console

PARTS = ("repeated", "run")
CLAIMED = 2.0  # μ of every audited release
RUN_EPSILONS = (1.0, 3.0, 10.0)

PARTS_HELP = "Parts to run, separated by commas."
RUNS_HELP = (
    "Number of releases with the audited image; as many are made without it. With fewer releases, "
    "an audit detects only larger leaks."
)
CONFIDENCE_HELP = (
    "Confidence of each repeated audit: a false alarm has a probability of at most 1 − confidence."
)


def main(
    parts: Annotated[str, typer.Option(help=PARTS_HELP)] = ",".join(PARTS),
    runs: Annotated[int, typer.Option(min=100, help=RUNS_HELP)] = 10_000,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999999, help=CONFIDENCE_HELP)] = 0.999,
    only: Annotated[
        str, typer.Option(help="Run only the repeated audits whose names contain this text.")
    ] = "",
    out: Annotated[
        Path, typer.Option(help="Directory for audit.csv, audit-run.csv and audit.png.")
    ] = Path("evaluation/audit"),
) -> None:
    """Bound privacy loss from below by attacks."""
    wanted = parts.split(",")
    if not set(wanted) <= set(PARTS):
        raise typer.BadParameter(
            f"--parts {parts}: expected one or more of {', '.join(PARTS)}, separated by commas"
        )
    keep_freed_memory()
    refuted = repeated(runs, confidence, only, out) if "repeated" in wanted else []
    refuted += one_runs(out) if "run" in wanted else []
    if refuted:
        print(f"The audit failed: {'; '.join(refuted)}", file=sys.stderr)
        raise typer.Exit(3)


def repeated(runs: int, confidence: float, only: str, out: Path) -> list[str]:
    """Audit every query, a step of DP-SGD, and the planted bugs.

    Returns a text for each refuted claim, and for each planted bug that was not found.
    """
    known = subjects()
    every = [s for s in [*known, *planted({s.name: s for s in known})] if only in s.name]
    if not every:
        raise typer.BadParameter(
            f"--only {only} matches no audit: expected part of one of these names: "
            f"{', '.join(s.name for s in known)}"
        )
    found = []
    for subject in every:
        with progress(f"audit of {subject.name}") as report:
            found.append(audits.audit(subject, runs, CLAIMED, confidence, report))
    replace_file(out / "audit.csv", verdicts_csv(found).encode())
    plot_verdicts(found, out / "audit.png")
    table_console().print(verdict_table(found, confidence))
    alarms = 1 - confidence ** sum(not row.planted for row in found)
    print(
        "If all claims are true, the probability of a false alarm in any of these audits is at "
        f"most {100 * alarms:.2g} %."
    )
    return [f"{row.name}: {verdict_of(row)}" for row in found if row.alarm != row.planted]


def one_runs(out: Path) -> list[str]:
    """Audit DP-SGD with canaries at each of RUN_EPSILONS. Returns a text for each refuted claim."""
    found = [one_run(target) for target in RUN_EPSILONS]
    replace_file(out / "audit-run.csv", runs_csv(found).encode())
    table_console().print(run_table(found))
    return [
        f"DP-SGD at ε = {row.epsilon:g}: the attack proves ε ≥ {row.low:.3g}"
        for row in found
        if row.alarm
    ]


if __name__ == "__main__":
    typer.run(main)
