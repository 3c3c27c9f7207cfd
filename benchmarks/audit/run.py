"""`stage audit`: attack the queries and DP-SGD on made images, and a release on real ones. Outside the pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfumato.errors import BudgetError, ConfigError, DataError
from sfumato.storage.artifacts import read_artifact
from sfumato.storage.files import replace_file
from stages.runner import (
    ARTIFACTS,
    CARD,
    EVALUATION,
    CardPath,
    Config,
    DryRun,
    check_local,
    input_option,
    load_plan,
    progress,
    show_local,
    state_dir,
    table_console,
)
from stages.utility import words

if TYPE_CHECKING:
    from sfumato.evaluation.audit.repeated import Verdict

PARTS = ("repeated", "run", "release")
MADE = PARTS[:2]  # on made images alone
CLAIMED = 2.0  # μ of every audited release
RUN_EPSILONS = (1.0, 3.0, 10.0)

PARTS_HELP = "Which of repeated, run (both on made images) and release (membership inference on real ones)."
OUT_HELP = "Directory for audit.csv, audit-run.csv, audit.png and, of a release, membership.csv."
RUNS_HELP = "Releases with the image, and as many without it. Fewer find less."
CONFIDENCE_HELP = "Of each repeated audit: it raises a false alarm in at most 1 of 1/(1 − confidence)."


def audit(
    parts: Annotated[str, typer.Option(help=PARTS_HELP)] = ",".join(MADE),
    runs: Annotated[int, typer.Option(min=100, help=RUNS_HELP)] = 10_000,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999999, help=CONFIDENCE_HELP)] = 0.999,
    only: Annotated[str | None, typer.Option(help="Only the repeated audits with this in their name.")] = None,
    config: Config = None,
    out: Annotated[Path, typer.Option(help=OUT_HELP)] = EVALUATION,
    card: CardPath = CARD,
    synthesize: Annotated[Path, input_option("synthesize")] = ARTIFACTS / "synthesize",
    dry_run: DryRun = False,
) -> None:
    """Local: lower bounds on privacy by attack; exit 3 where a claim is refuted, or a planted bug is not found."""
    wanted = words(parts, "--parts", PARTS)
    if dry_run:
        reads = f"{synthesize}, {card} (sensitive and hold-out images)" if "release" in wanted else "nothing"
        typer.echo(f"reads   {reads}\nwrites  {out / 'audit.csv'} and a plot\ncharges nothing")
        return
    check_local("--out", out / "membership.csv")
    from sfumato.runtime.compute import configure_processor

    configure_processor()
    refuted: list[str] = []
    if "repeated" in wanted:
        refuted += repeated(runs, confidence, only, out)
    if "run" in wanted:
        refuted += one_runs(out)
    if "release" in wanted:
        attack_release(config, out, card, synthesize)
    if refuted:
        raise BudgetError(f"the audit refutes what is claimed: {'; '.join(refuted)}")


def repeated(runs: int, confidence: float, only: str | None, out: Path) -> list[str]:
    """Audit every query, the step of DP-SGD, and the planted bugs; returns what does not hold."""
    from sfumato.evaluation.audit import repeated as audits
    from sfumato.evaluation.audit.subjects import planted, subjects
    from sfumato.evaluation.audit.tables import plot_verdicts, verdict_of, verdict_table, verdicts_csv

    known = subjects()
    every = [s for s in [*known, *planted({s.name: s for s in known})] if only is None or only in s.name]
    if not every:
        raise ConfigError(f"--only {only!r}: no audit has it in its name: {', '.join(s.name for s in known)}")
    found: list[Verdict] = []
    for subject in every:
        with progress(f"audit of {subject.name}") as report:
            found.append(audits.audit(subject, runs, CLAIMED, confidence, report))
    replace_file(out / "audit.csv", verdicts_csv(found).encode())
    plot_verdicts(found, out / "audit" / "audit.png")  # not beside the pictures of real images
    table_console().print(verdict_table(found, confidence))
    alarms = 1 - confidence ** sum(not row.planted for row in found)
    typer.echo(f"False alarm of any of these audits where all claims hold: at most {100 * alarms:.2g} %.")
    return [f"{row.name}: {verdict_of(row)}" for row in found if row.alarm != row.planted]


def one_runs(out: Path) -> list[str]:
    """DP-SGD with canaries at some ε; returns what does not hold."""
    from sfumato.evaluation.audit.canaries import one_run
    from sfumato.evaluation.audit.tables import run_table, runs_csv

    found = [one_run(target) for target in RUN_EPSILONS]
    replace_file(out / "audit-run.csv", runs_csv(found).encode())
    table_console().print(run_table(found))
    return [f"DP-SGD at ε = {row.epsilon:g}: at least {row.low:.3g}" for row in found if row.alarm]


def attack_release(config: Path | None, out: Path, card: Path, synthesize: Path) -> None:
    from sfumato.data.images import load_images
    from sfumato.data.store import read_card
    from sfumato.evaluation.audit.membership import membership
    from sfumato.evaluation.audit.tables import attack_table, attacks_csv
    from sfumato.privacy.authorize import open_local

    read_artifact(synthesize, "synthesize")
    release = load_images(synthesize, load_plan("evaluate", config).classes)
    sensitive, holdout = open_local(state_dir(), read_card(card), "audit")
    if not len(holdout):
        raise DataError("there is no hold-out to compare members with: set data.holdout_fraction, and prepare again")
    found = membership(release, sensitive, holdout)
    replace_file(out / "membership.csv", attacks_csv(found).encode())
    show_local([attack_table(found)], out / "membership.csv")
