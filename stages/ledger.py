"""`stage ledger write|check|show|adopt|history`: write, check and show the ledger of a release;
rebuild a journal; list all charges on a dataset.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfumato.errors import ConfigError
from sfumato.settings.stage import LEDGER, LOCK, PLAN
from stages.dvc_lock import keep_copy
from stages.screen import charges, delta_text, say, table_console, tell
from stages.state import dataset_of_project, read_policy, state_dir

if TYPE_CHECKING:
    from sfumato.privacy.odometer import Odometer

app = typer.Typer(
    no_args_is_help=True,
    help="Write, check and show the privacy ledger and the history of all charges.",
)
LedgerPath = Annotated[Path, typer.Option("--ledger", help="Ledger file.")]
INCOMPLETE = " (incomplete: more may have been spent, or the cost for one person is unknown)"
OPINIONS_HELP = (
    "own: compute ε with this package's accountants only. all: also with Opacus's two "
    "accountants, which must be installed."
)
LEDGER_ONLY_HELP = (
    "Check only the ledger, if you received it without its project. This option is refused inside "
    "a project."
)


@app.command()
def write(out: Annotated[Path, typer.Option(help="File to write.")] = LEDGER) -> None:
    """Write the ledger from the records of the release and of every query, and check it."""
    from sfumato.privacy.project_ledger import write_ledger

    ledger, spent = write_ledger(Path(), state_dir(), out, say)
    keep_copy()
    bound = f"ε = {spent:.4f} of {ledger['target']:g} at δ = {delta_text(ledger['delta'])}"
    tell(f"{out}: {bound}, {charges(len(ledger['records']))}")


@app.command()
def check(
    ledger: LedgerPath = LEDGER,
    epsilon: Annotated[float | None, typer.Option(help="Fail above this epsilon.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="Compute epsilon at this delta instead of the ledger's.")
    ] = None,
    unit: Annotated[
        str | None, typer.Option(help="Fail unless the ledger protects this unit: image or group.")
    ] = None,
    artifacts: Annotated[
        bool, typer.Option("--artifacts", help="Also verify files and records of all artifacts.")
    ] = False,
    ledger_only: Annotated[bool, typer.Option("--ledger-only", help=LEDGER_ONLY_HELP)] = False,
    opinions: Annotated[str, typer.Option(help=OPINIONS_HELP, metavar="own|all")] = "own",
) -> None:
    """Check the ledger: recompute epsilon from the records.

    Exits with code 3 if a check fails. Needs no data and no GPU.
    """
    from sfumato.privacy.check import Bound, verify
    from sfumato.privacy.events import PROTECTED

    if opinions not in ("own", "all"):
        raise ConfigError(f"--opinions {opinions}: expected own or all")
    state = None
    with suppress(ConfigError):  # reviewers may have no state directory; the check needs none
        state = state_dir()
    checked = verify(
        ledger,
        Bound(limit=epsilon, delta=delta, unit=unit),
        artifacts=artifacts,
        ledger_only=ledger_only,
        all_opinions=opinions == "all",
        state=state,
    )
    content = checked.ledger
    bound = ""
    if epsilon is not None:
        bound = f" ≤ {epsilon:g}"
    units = sorted({record["unit"] for record in content["records"]})
    protected = "".join(f", for {PROTECTED.get(name, name)}" for name in units)
    tell(
        f"{ledger} is valid: ε = {checked.epsilon:.4f}{bound} at δ = {delta_text(checked.delta)}, "
        f"{charges(len(content['records']))}, {content['adjacency']}{protected}"
    )
    by = ", ".join(f"{name} {opinion}" for name, opinion in checked.opinions.items())
    note = ""
    if opinions == "own":
        note = " (not compared with Opacus; to compare, use --opinions all)"
    tell(f"ε by accountant: {by}{note}")
    for name, spent in checked.epsilon_by_set.items():
        tell(
            f"ε = {spent:.4f} for each person in {name!r} (the owners declare that no person is in "
            "two of their data sets)"
        )
    if ledger_only:
        tell(f"not compared with a run: {ledger} was checked without its project")
    else:
        tell(
            f"compared with {ledger.parent / LOCK}: the ledger belongs to the same run, and "
            "includes every query of it"
        )


@app.command()
def show(ledger: LedgerPath = LEDGER) -> None:
    """Show the ledger as a table."""
    from rich.table import Table

    from sfumato.privacy.check import LedgerError, malformed, mistakes_in_records
    from sfumato.privacy.events import Mechanism
    from sfumato.privacy.ledger import by_id, read_ledger

    content = read_ledger(ledger)
    if problems := malformed(content) or mistakes_in_records(content):
        raise LedgerError(ledger, problems)
    records = by_id(content)
    bound = (
        f"ε = {content['epsilon'][content['accountant']]:.4f} at δ = {delta_text(content['delta'])}"
    )
    heads = ("stage", "charge", "released", "mechanism", "ε alone", "share")
    table = Table(*heads, title=f"{content['recipe']}: {bound}", title_justify="left")
    for name, row in content["stages"].items():
        for i, key in enumerate(row["records"]):
            record = records[key]
            cost = (f"{row['epsilon']:.3f}", f"{row['share']:.1%}") if i == 0 else ("", "")
            table.add_row(
                name, key[:8], record["released"], str(Mechanism.from_json(record["event"])), *cost
            )
    table_console().print(table)
    by = ", ".join(f"{name} {value:.4f}" for name, value in content["epsilon"].items())
    odometer = content["odometer"]
    ever = f"{charges(odometer['charges'])}, ε = {odometer['epsilon']:.4f}"
    if not odometer["complete"]:
        ever = f"at least {ever}{INCOMPLETE}"
    ever = f"on dataset {odometer['dataset_id']!r} until this ledger was written: {ever}"
    if owners := ", ".join(content.get("apart", ())):
        ever = f"on the datasets {owners}: only each owner's own journal and ledger list them"
    tell(f"ε by accountant: {by}. {content['adjacency']}. All charges opened {ever}")


@app.command()
def adopt() -> None:
    """Rebuild a lost or invalid journal from its remains, from ledgers and from artifacts."""
    from sfumato.privacy.project_ledger import adopt_charges

    odometer, new, unreadable = adopt_charges(Path(), state_dir(), say)
    if unreadable:
        say(
            f"number of entries in the old journal that could not be read: {unreadable}. They are "
            "not counted. The old journal is kept beside the new one"
        )
    tell(f"{odometer.path}: {charges(new)} adopted, {len(odometer.opened())} counted in total")
    tell("More charges may be lost, so ledgers and reports mark the odometer as incomplete")


@app.command()
def history(
    dataset: Annotated[str | None, typer.Option(help="Dataset id. Default: the project's.")] = None,
    delta: Annotated[
        float | None,
        typer.Option(help="Delta at which the total ε is computed. Default: the plan's delta."),
    ] = None,
    actors: Annotated[bool, typer.Option("--actors", help="Show who caused each entry.")] = False,
) -> None:
    """List every charge ever opened on the sensitive images, including abandoned ones."""
    from rich.table import Table

    from sfumato.privacy.accountant import epsilon
    from sfumato.privacy.odometer import Odometer
    from sfumato.privacy.project_ledger import seen_in_project
    from sfumato.storage.access import logged_actors
    from sfumato.storage.journal import GENESIS

    mine = dataset_of_project()
    name = dataset or mine
    if name is None:  # also in a merged project
        raise ConfigError("this folder has no dataset of its own: choose one with --dataset")
    if mine is None and delta is None:
        raise ConfigError("this folder has no dataset of its own: choose δ with --delta")
    odometer = Odometer(state_dir(), name)
    entries = odometer.entries()
    unknown = odometer.missing(seen_in_project(odometer.dataset_id, Path(), state_dir()))
    if unknown:
        say(
            f"{odometer.path} is an older copy or a different journal: it lacks the entry "
            f"{min(unknown)[:8]}, or lists it as a charge that is still open. This project's files "
            "depend on this entry"
        )
        say(
            "more may have been spent than this journal lists: restore the newest state "
            "directory, or run `stage ledger adopt`"
        )
    if not entries or entries[-1]["kind"] == GENESIS:
        tell(f"dataset {odometer.dataset_id!r}: no history in {odometer.path}")
        return
    accountant = "rdp"
    if delta is None or (name == mine and (PLAN / "permission.json").exists()):
        policy = read_policy()
        if name == mine:
            accountant = policy.accountant
        if delta is None:
            delta = policy.delta
    heads = ("time (UTC)", "stage", "charge", "mechanism", "state")
    table = Table(*heads, title=f"dataset {odometer.dataset_id}", title_justify="left")
    acted = {}
    if actors:
        acted = {head: f"\nby {name}" for head, name in logged_actors(state_dir()).items()}
    for row in history_rows(odometer, entries, acted):
        table.add_row(*row)
    table_console().print(table)
    events = odometer.events()
    total = (
        f"{charges(len(events))}, together ε = {epsilon(events, delta, accountant):.4f} at δ = "
        f"{delta_text(delta)}"
    )
    units = {record["unit"] for record in odometer.opened()}
    if unknown or not odometer.complete() or len(units) > 1:
        total += INCOMPLETE
    tell(total)


def history_rows(
    odometer: Odometer, entries: Iterable[dict], acted: Mapping[str, str]
) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the history.

    acted: text about the actor of each entry, by the entry's head (its hash in the journal).
    """
    from sfumato.privacy.events import Mechanism
    from sfumato.privacy.odometer import ABANDON, ADOPT, CLOSE, LOCAL_USE, OPEN

    end_states = {CLOSE: "released", ABANDON: "abandoned"}
    runs = {run.id: run for run in odometer.charges()}
    for entry in entries:
        time = utc(entry["time"])
        if not sys.stdout.isatty():
            # Show only the date: exact times reveal how long a query took, and therefore how many
            # images it read
            time = time[:10]
        actor = acted.get(entry.get("head", ""), "")
        records: list[tuple[dict, str]] = []
        if entry["kind"] == OPEN:
            # A resumed run is shown with its newest record, as in ledgers
            run = runs[entry["record"]["id"]]
            records = [
                (run.record, end_states.get(run.end or "", f"open, journalled uses: {run.uses}"))
            ]
        # Shown on a terminal only, because it reveals when the images changed
        elif entry["kind"] == LOCAL_USE and sys.stdout.isatty():
            yield time, "local", "", entry["purpose"], f"outside the guarantee{actor}"
        elif entry["kind"] == ADOPT:
            records = [(record, "adopted") for record in entry["records"]]
        for record, state in records:
            mechanism = Mechanism.from_json(record["event"])
            yield time, record["stage"], record["id"][:8], str(mechanism), state + actor


def utc(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):  # the clock was wrong when the entry was written
        return f"{seconds} s after 1970"
